#include "program/passes/read_as_stored.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "program/passes/op_forms.h"
#include "program/passes/rewrite.h"

namespace quern {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Copy {
  ValueId copy, source;
  double bytes;  ///< that making it moves
};

/// Those that ops of the program make and read, the largest first.
std::vector<Copy> transposed_copies(const JointProgram& joint, const OpSet& ops, const Geometry& geometry) {
  const Program& program = joint.program;
  std::vector<Copy> copies;
  const std::vector<bool> by_value = read_values(program);
  auto read = [&](ValueId id) { return id != kNoValue && by_value[static_cast<std::size_t>(id)]; };
  auto add = [&](ValueId copy, ValueId source, double passes) {
    if (!read(copy) || !read(source) || copy == joint.gradient_out) return;
    const Value& value = program[copy];
    const bool handed_on = std::find(program.outputs.begin(), program.outputs.end(), copy) != program.outputs.end();
    if (value.role != Role::local || handed_on) return;
    const std::int64_t bytes = byte_count(extents_at(value.shape, geometry.tokens()), value.dtype);
    copies.push_back({copy, source, passes * static_cast<double>(bytes)});
  };
  for (const Op& op : program.ops) {
    const OpSpec& spec = ops.at(op.kind);
    if (spec.transposes) add(op.outputs[0], op.inputs[0], 2);
    for (const auto& [copy, source] : spec.transposed)
      add(op.outputs[static_cast<std::size_t>(copy)], op.outputs[static_cast<std::size_t>(source)], 1);
  }
  std::stable_sort(copies.begin(), copies.end(), [](const Copy& a, const Copy& b) { return a.bytes > b.bytes; });
  return copies;
}

/// Whether that leaves nothing in the op that reads the copy.
bool turn(Op& op, const Copy& copy) {
  // The layout of scales of blocks is stated for one form alone.
  if (op.kind != "matmul" || op.attributes.integer_or("scale_rows_b", 0) != 0) return false;
  for (const auto& [operand, flag] : {std::pair<std::size_t, const char*>{0, "transpose_a"}, {1, "transpose_b"}}) {
    if (op.inputs[operand] != copy.copy) continue;
    op.inputs[operand] = copy.source;
    op.attributes.set(flag, std::int64_t{op.attributes.integer_or(flag, 0) == 0});
  }
  return std::find(op.inputs.begin(), op.inputs.end(), copy.copy) == op.inputs.end();
}

}  // namespace

JointProgram read_as_stored(JointProgram joint, const OpSet& ops, const Geometry& geometry, const StoredCosts& costs) {
  Program& program = joint.program;
  const std::vector<Copy> copies = transposed_copies(joint, ops, geometry);
  if (copies.empty()) return joint;
  const OpForms forms(program, ops, geometry);  // what is read of a product does not change
  // Of the first form; infinite where one is refused.
  auto seconds = [&](const Op& op) {
    double first = 0;
    const std::vector<OpInstance> asked = forms.of(op);
    for (std::size_t i = 0; i < asked.size(); ++i) {
      const std::optional<double> told = costs.seconds(asked[i]);
      if (!told) return kNever;
      if (i == 0) first = *told;
    }
    return first;
  };
  for (const Copy& copy : copies) {
    const std::vector<int> readers = program.consumers(copy.copy);
    std::vector<Op> changed;
    double before = copy.bytes * costs.seconds_per_byte, after = 0;
    for (int reader : readers) {
      const Op& op = program.ops[static_cast<std::size_t>(reader)];
      changed.push_back(op);
      after += turn(changed.back(), copy) ? seconds(changed.back()) : kNever;
      if (after == kNever) break;
      before += seconds(op);
    }
    if (after == kNever || after > before) continue;
    for (std::size_t i = 0; i < readers.size(); ++i)
      program.ops[static_cast<std::size_t>(readers[i])] = std::move(changed[i]);
  }
  drop_unused(program, {&joint.gradient_in, &joint.gradient_out});
  check_program(program);
  return joint;
}

}  // namespace quern
