#include "program/passes/read_as_stored.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "program/passes/op_forms.h"
#include "program/passes/rewrite.h"

namespace quern {

namespace {

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
    const std::int64_t bytes = byte_count(extents_at(value.shape, geometry), value.dtype);
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
  // The layout of block scales is stated for one form alone, but of square ones.
  auto flag = [&op](const char* name) { return op.attributes.integer_or(name, 0) != 0; };
  if (op.kind != "matmul" || (flag("scale_rows_b") && !flag("square_scales"))) return false;
  for (const auto& [operand, side] : {std::pair<std::size_t, const char*>{0, "transpose_a"}, {1, "transpose_b"}}) {
    if (op.inputs[operand] != copy.copy) continue;
    op.inputs[operand] = copy.source;
    op.attributes.set(side, std::int64_t{!flag(side)});
  }
  return std::find(op.inputs.begin(), op.inputs.end(), copy.copy) == op.inputs.end();
}

}  // namespace

JointProgram read_as_stored(JointProgram joint, const OpSet& ops, const Geometry& geometry, const StoredCosts& costs) {
  const std::vector<Copy> copies = transposed_copies(joint, ops, geometry);
  if (copies.empty()) return joint;
  auto needed = [](JointProgram of) {
    drop_unused(of.program, {&of.gradient_in, &of.gradient_out});
    return of;
  };
  const OpForms forms(joint.program, ops, geometry);  // the values read by a matmul do not change
  double seconds = costs.seconds(needed(joint).program);
  for (const Copy& copy : copies) {
    JointProgram changed = joint;
    auto turned = [&](int reader) {
      Op& op = changed.program.ops[static_cast<std::size_t>(reader)];
      if (!turn(op, copy)) return false;
      const std::vector<OpInstance> asked = forms.of(op);
      return std::all_of(asked.begin(), asked.end(), costs.takes);
    };
    const std::vector<int> readers = joint.program.consumers(copy.copy);
    if (!std::all_of(readers.begin(), readers.end(), turned)) continue;
    const double then = costs.seconds(needed(changed).program);
    if (then > seconds) continue;
    seconds = then;
    joint.program.ops = std::move(changed.program.ops);
  }
  joint = needed(std::move(joint));
  check_program(joint.program);
  return joint;
}

}  // namespace quern
