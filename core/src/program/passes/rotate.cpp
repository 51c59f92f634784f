#include "program/passes/rotate.h"

#include <utility>

#include "quern/error.h"

namespace quern {

namespace {

// Drops the add that makes the program's output; its operands become the outputs.
void take_trailing_add(Program& program) {
  int producer = program.producer(program.outputs[0]);
  program.outputs = program.ops[static_cast<std::size_t>(producer)].inputs;
  program.ops.erase(program.ops.begin() + producer);
}

/// The kind of the add that makes the program's output, which nothing else reads; empty if it is no add, or of equal
/// operands, which are no pair.
std::string trailing_add(const Program& program, const OpSet& ops) {
  const int last = program.producer(program.outputs[0]);
  if (last < 0 || !program.consumers(program.outputs[0]).empty()) return {};
  const Op& op = program.ops[static_cast<std::size_t>(last)];
  const bool adds = ops.at(op.kind).op_class == OpClass::add && op.inputs[0] != op.inputs[1];
  return adds ? op.kind : "";
}

// Replaces the boundary input `x` by (residual, branch) and starts with their sum, which takes the name of x.
void put_leading_add(Program& program, const std::string& add_kind) {
  if (program.inputs.size() != 1) fail_internal("rotate", program.name + " does not take one stream");
  ValueId x = program.inputs[0];
  Value boundary = program[x];
  program[x].role = Role::local;
  Value residual = boundary, branch = boundary;
  residual.name = "residual";
  branch.name = "branch";
  program.inputs = {program.add_value(std::move(residual)), program.add_value(std::move(branch))};
  Op add{.kind = add_kind, .inputs = program.inputs, .outputs = {x}, .attributes = {}};
  program.ops.insert(program.ops.begin(), std::move(add));
}

}  // namespace

ModelPrograms rotate(ModelPrograms written, const OpSet& ops) {
  std::string add_kind;
  for (const Program& block : written.blocks) {
    const std::string kind = trailing_add(block, ops);
    if (kind.empty() || (!add_kind.empty() && kind != add_kind)) return written;
    add_kind = kind;
  }
  ModelPrograms rotated = std::move(written);
  Program first = rotated.blocks[static_cast<std::size_t>(rotated.block_of_layer[0])];
  first.name = "first_" + first.name;
  take_trailing_add(first);
  for (Program& block : rotated.blocks) {
    take_trailing_add(block);
    put_leading_add(block, add_kind);
  }
  put_leading_add(rotated.head, add_kind);
  rotated.block_of_layer[0] = static_cast<int>(rotated.blocks.size());
  rotated.blocks.push_back(std::move(first));
  for (const Program& block : rotated.blocks) check_program(block);
  check_program(rotated.head);
  return rotated;
}

}  // namespace quern
