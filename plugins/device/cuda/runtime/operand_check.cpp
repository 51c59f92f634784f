#include "runtime/operand_check.h"

namespace quern::cuda {

namespace {

bool is_element(DType type) { return type == DType::f32 || type == DType::bf16; }

/// An output that the program has no value for.
bool is_missing(const Operand& output) { return !output.present && output.extents.empty(); }

}  // namespace

OperandCheck::OperandCheck(const OpInstance& op, std::size_t inputs, std::size_t outputs, std::size_t element)
    : op_(op) {
  that(op.inputs.size() == inputs,
       "takes " + std::to_string(inputs) + " inputs, found " + std::to_string(op.inputs.size()));
  that(op.outputs.size() == outputs,
       "has " + std::to_string(outputs) + " outputs, found " + std::to_string(op.outputs.size()));
  if (!ok()) return;
  element_ = op.inputs[element].dtype;
  that(is_element(element_), "on cuda takes f32 or bf16 operands, found " + std::string(name_of(element_)));
}

OperandCheck& OperandCheck::that(bool holds, const std::string& otherwise) {
  if (refusal_.empty() && !holds) refusal_ = op_.kind + " " + otherwise;
  return *this;
}

void OperandCheck::operand(const Operand& operand, const char* name, const Extents& extents, DType dtype) {
  std::string who = std::string("operand ") + name + ": found ";
  that(operand.extents == extents, who + to_string(operand.extents) + ", expected " + to_string(extents));
  that(operand.dtype == dtype, who + std::string(name_of(operand.dtype)) + ", expected " + std::string(name_of(dtype)));
}

OperandCheck& OperandCheck::input(std::size_t i, const char* name, const Extents& extents) {
  return input(i, name, extents, element_);
}

OperandCheck& OperandCheck::output(std::size_t i, const char* name, const Extents& extents) {
  return output(i, name, extents, element_);
}

OperandCheck& OperandCheck::input(std::size_t i, const char* name, const Extents& extents, DType dtype) {
  if (!ok()) return *this;
  that(op_.inputs[i].present, std::string("operand ") + name + ": absent");
  operand(op_.inputs[i], name, extents, dtype);
  return *this;
}

OperandCheck& OperandCheck::output(std::size_t i, const char* name, const Extents& extents, DType dtype) {
  if (!ok() || is_missing(op_.outputs[i])) return *this;
  operand(op_.outputs[i], name, extents, dtype);
  return that(!op_.outputs[i].accumulate, std::string("operand ") + name + ": cannot be added to");
}

OperandCheck& OperandCheck::sum(std::size_t i, const char* name, const Extents& extents) {
  if (!ok() || is_missing(op_.outputs[i])) return *this;
  that(is_element(op_.outputs[i].dtype), std::string("operand ") + name + ": found " +
                                             std::string(name_of(op_.outputs[i].dtype)) + ", expected f32 or bf16");
  operand(op_.outputs[i], name, extents, op_.outputs[i].dtype);
  return *this;
}

Extents extents_of(const OpInstance& op, std::size_t input) {
  return input < op.inputs.size() ? op.inputs[input].extents : Extents{};
}

Matrix matrix_of(const OpInstance& op, std::size_t input) {
  Extents extents = extents_of(op, input);
  if (extents.empty() || extents.back() == 0) return {};
  return {element_count(extents) / extents.back(), extents.back()};
}

}  // namespace quern::cuda
