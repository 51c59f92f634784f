#include "program/inputs.h"

#include <algorithm>
#include <utility>

#include "program/names.h"
#include "quern/error.h"

namespace quern {

namespace {

std::string described(const Value& input) {
  return to_string(input.shape) + " " + std::string(name_of(input.dtype)) +
         (input.below > 0 ? " below " + std::to_string(input.below) : "");
}

}  // namespace

void need_same_input(Value& known, const Value& declared) {
  const bool same = known.role == Role::runtime && known.shape == declared.shape && known.dtype == declared.dtype &&
                    (known.below == declared.below || known.below == 0 || declared.below == 0);
  if (!same)
    throw Error(ErrorCode::config, {.where = "model, input " + declared.name,
                                    .what = "its programs declare it in two ways",
                                    .found = described(declared),
                                    .expected = described(known),
                                    .next = "declare it alike in all programs"});
  known.below = std::max(known.below, declared.below);
}

std::vector<Value> declared_inputs(const std::vector<const Program*>& programs) {
  std::vector<Value> inputs;
  for (const Program* program : programs)
    for (const Value& value : program->values) {
      if (value.role != Role::runtime || value.name == names::kStep) continue;
      auto known =
          std::find_if(inputs.begin(), inputs.end(), [&](const Value& input) { return input.name == value.name; });
      if (known == inputs.end())
        inputs.push_back(value);
      else
        need_same_input(*known, value);
    }
  return inputs;
}

void append_loss_stats(Program& program, const OpSet& ops, std::vector<ValueId> inputs, Attributes attributes) {
  const ValueId known = program.find(names::kLossStats);
  const ValueId stats = append_op(
      program, ops, DType::f32,
      {.kind = "loss_stats", .inputs = std::move(inputs), .attributes = std::move(attributes)}, names::kLossStats)[0];
  program[stats].role = Role::state;
  if (known == kNoValue) return;
  program.values.pop_back();  // several ops add to one state
  program.ops.back().outputs[0] = known;
}

}  // namespace quern
