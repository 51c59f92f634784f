#include "runtime/op_check.h"

namespace quern::cpu {

namespace {

bool is_real(DType type) {
  switch (type) {
    case DType::f64:
    case DType::f32:
    case DType::bf16:
    case DType::e4m3:
    case DType::e5m2:
    case DType::i8: return true;
    default: return false;
  }
}

}  // namespace

OpCheck::OpCheck(const OpInstance& op, std::size_t inputs, std::size_t outputs) : op_(op) {
  that(op.inputs.size() == inputs,
       "takes " + std::to_string(inputs) + " inputs, found " + std::to_string(op.inputs.size()));
  that(op.outputs.size() == outputs,
       "has " + std::to_string(outputs) + " outputs, found " + std::to_string(op.outputs.size()));
}

OpCheck& OpCheck::that(bool holds, const std::string& otherwise) {
  if (refusal_.empty() && !holds) refusal_ = op_.kind + " " + otherwise;
  return *this;
}

void OpCheck::operand(const Operand& operand, bool must_be_present, const char* name, const Extents& extents,
                      const DType* dtype) {
  std::string who = std::string("operand ") + name + ": ";
  that(operand.present || !must_be_present, who + "absent");
  that(operand.extents == extents, who + "found " + to_string(operand.extents) + ", expected " + to_string(extents));
  std::string found = who + "found " + std::string(name_of(operand.dtype)) + ", expected ";
  if (dtype)
    that(operand.dtype == *dtype, found + std::string(name_of(*dtype)));
  else
    that(is_real(operand.dtype), found + "a real dtype");
}

OpCheck& OpCheck::input(std::size_t i, const char* name, const Extents& extents) {
  if (ok()) operand(op_.inputs[i], true, name, extents, nullptr);
  return *this;
}

OpCheck& OpCheck::output(std::size_t i, const char* name, const Extents& extents) {
  if (ok()) operand(op_.outputs[i], false, name, extents, nullptr);
  return *this;
}

OpCheck& OpCheck::input(std::size_t i, const char* name, const Extents& extents, DType dtype) {
  if (ok()) operand(op_.inputs[i], true, name, extents, &dtype);
  return *this;
}

OpCheck& OpCheck::output(std::size_t i, const char* name, const Extents& extents, DType dtype) {
  if (ok()) operand(op_.outputs[i], false, name, extents, &dtype);
  return *this;
}

OpCheck& OpCheck::overwrites(std::size_t i, const char* name) {
  if (ok()) that(!op_.outputs[i].accumulate, std::string("operand ") + name + ": cannot be added to");
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

}  // namespace quern::cpu
