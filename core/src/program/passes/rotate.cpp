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

ModelPrograms rotate(const Program& embed, const Program& block, const Program& head, const OpSet& ops) {
  ModelPrograms rotated{embed, block, block, head};
  int last = block.producer(block.outputs[0]);
  const Op* op = last >= 0 ? &block.ops[static_cast<std::size_t>(last)] : nullptr;
  bool ends_in_add =
      op && ops.at(op->kind).op_class == OpClass::add && op->inputs[0] != op->inputs[1];  // equal ones are no pair
  if (!ends_in_add || !block.consumers(block.outputs[0]).empty()) return rotated;
  rotated.first_block.name = "first_block";
  const std::string add_kind = op->kind;
  take_trailing_add(rotated.first_block);
  take_trailing_add(rotated.block);
  put_leading_add(rotated.block, add_kind);
  put_leading_add(rotated.head, add_kind);
  for (const Program* program : {&rotated.first_block, &rotated.block, &rotated.head}) check_program(*program);
  return rotated;
}

}  // namespace quern
