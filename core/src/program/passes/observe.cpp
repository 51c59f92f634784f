#include "program/passes/observe.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "program/passes/rewrite.h"
#include "quern/step_state.h"

namespace quern {

namespace {

constexpr std::string_view kSuffix = ".observed";

// Observations outside the layers share one name space.
std::string name_in(const Program& program, const std::string& tensor) {
  const bool outside = program.name == "embed" || program.name == "head";
  return (outside ? program.name + "." : "") + tensor + std::string(kSuffix);
}

// The ops that observe what `op` makes; appended to the program and taken off again.
std::vector<Op> observers(Program& program, const OpSet& ops, const Op& op) {
  std::vector<Op> made;
  const OpSpec& spec = ops.at(op.kind);
  if (!spec.quantized) return made;
  const std::vector<bool> read = read_values(program);
  for (const OpSpec::QuantizedOutput& coded : spec.quantized(op.attributes)) {
    const ValueId codes = op.outputs[coded.codes], scale = op.outputs[coded.scale];
    if (scale == kNoValue || !read[static_cast<std::size_t>(scale)]) continue;
    const ValueId state = coded.state < 0 ? kNoValue : op.inputs[static_cast<std::size_t>(coded.state)];
    Op observe{.kind = "observe_scale",
               .inputs = {op.inputs[0], scale, state},
               .outputs = {},
               .attributes = {{"format", op.attributes.word("format")}, {"layout", coded.layout}},
               .phase = op.phase};
    std::string tensor = program[codes == kNoValue ? scale : codes].name;
    if (codes == kNoValue) tensor.resize(tensor.size() - 1 - spec.outputs[coded.scale].size());  // without a reader
    const std::string name = name_in(program, tensor);
    const ValueId observed = append_op(program, ops, DType::f32, std::move(observe), name)[0];
    program[observed].role = Role::observation;
    made.push_back(std::move(program.ops.back()));
    program.ops.pop_back();
  }
  return made;
}

// A tensor that an op quantizes without handing it on is observed by that op.
void observe_inside(Program& program, const OpSet& ops, std::size_t index) {
  const OpSpec& spec = ops.at(program.ops[index].kind);
  const std::string tensor = spec.quantized_inside ? spec.quantized_inside(program.ops[index]) : "";
  if (tensor.empty()) return;
  const ValueId observed = program.add_value({.name = name_in(program, tensor),
                                              .shape = {kScaleObservationWords},
                                              .dtype = DType::u32,
                                              .role = Role::observation});
  program.ops[index].outputs.push_back(observed);
}

}  // namespace

void observe_scales(Program& program, const OpSet& ops) {
  for (std::size_t i = 0; i < program.ops.size(); ++i) {
    observe_inside(program, ops, i);
    for (Op& op : observers(program, ops, Op(program.ops[i])))
      program.ops.insert(program.ops.begin() + static_cast<std::ptrdiff_t>(++i), std::move(op));
  }
  check_program(program);
}

Program observe_copies(const Program& refresh, const OpSet& ops) {
  Program program = refresh;
  program.name = "observe";
  program.ops.clear();
  for (const Op& op : refresh.ops)
    for (Op& observe : observers(program, ops, op)) program.ops.push_back(std::move(observe));
  drop_unused(program);
  return program;
}

Unobserved without_observations(const Program& program) {
  Unobserved rest{.runs = std::vector<bool>(program.ops.size(), true), .read = {}};
  auto is_read = [&](ValueId id) {
    return id != kNoValue && rest.read[static_cast<std::size_t>(id)] && program[id].role != Role::observation;
  };
  for (bool changed = true; changed;) {
    Program running = program;
    for (std::size_t i = 0; i < program.ops.size(); ++i)
      if (!rest.runs[i]) running.ops[i].inputs.clear();
    rest.read = read_values(running);
    changed = false;
    for (std::size_t i = 0; i < program.ops.size(); ++i) {
      const std::vector<ValueId>& outputs = program.ops[i].outputs;
      if (!rest.runs[i] || outputs.empty() || std::any_of(outputs.begin(), outputs.end(), is_read)) continue;
      rest.runs[i] = false;
      changed = true;
    }
  }
  for (std::size_t id = 0; id < rest.read.size(); ++id) rest.read[id] = is_read(static_cast<ValueId>(id));
  return rest;
}

std::string observed_tensor(const Value& observation) {
  return observation.name.substr(0, observation.name.size() - kSuffix.size());
}

}  // namespace quern
