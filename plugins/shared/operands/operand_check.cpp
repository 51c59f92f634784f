#include "shared/operands/operand_check.h"

#include <algorithm>
#include <utility>

namespace quern::operands {

namespace {

bool is_missing(const Operand& output) { return !output.present && output.extents.empty(); }

}  // namespace

OperandCheck::OperandCheck(const OpInstance& op, std::size_t inputs, std::size_t outputs, Dtypes plain, Dtypes sums)
    : op_(op), plain_(std::move(plain)), sums_(std::move(sums)) {
  that(op.inputs.size() == inputs,
       "takes " + std::to_string(inputs) + " inputs, found " + std::to_string(op.inputs.size()));
  that(op.outputs.size() == outputs,
       "has " + std::to_string(outputs) + " outputs, found " + std::to_string(op.outputs.size()));
}

OperandCheck& OperandCheck::that(bool holds, const std::string& otherwise) {
  if (refusal_.empty() && !holds) refusal_ = op_.kind + " " + otherwise;
  return *this;
}

void OperandCheck::operand(const Operand& operand, const char* name, const Extents& extents, const Dtypes& dtypes) {
  const std::string who = std::string("operand ") + name + ": found ";
  that(operand.extents == extents, who + to_string(operand.extents) + ", expected " + to_string(extents));
  that(std::ranges::count(dtypes.any, operand.dtype) > 0,
       who + std::string(name_of(operand.dtype)) + ", expected " + dtypes.name);
}

OperandCheck& OperandCheck::input(std::size_t i, const char* name, const Extents& extents) {
  return input(i, name, extents, plain_);
}

OperandCheck& OperandCheck::output(std::size_t i, const char* name, const Extents& extents) {
  return output(i, name, extents, plain_);
}

OperandCheck& OperandCheck::input(std::size_t i, const char* name, const Extents& extents, const Dtypes& dtypes) {
  if (!ok()) return *this;
  that(op_.inputs[i].present, std::string("operand ") + name + ": absent");
  operand(op_.inputs[i], name, extents, dtypes);
  return *this;
}

OperandCheck& OperandCheck::output(std::size_t i, const char* name, const Extents& extents, const Dtypes& dtypes) {
  if (!ok() || is_missing(op_.outputs[i])) return *this;
  operand(op_.outputs[i], name, extents, dtypes);
  return that(!op_.outputs[i].accumulate, std::string("operand ") + name + ": cannot be added to");
}

OperandCheck& OperandCheck::sum(std::size_t i, const char* name, const Extents& extents) {
  return sum(i, name, extents, sums_);
}

OperandCheck& OperandCheck::sum(std::size_t i, const char* name, const Extents& extents, const Dtypes& dtypes) {
  if (ok() && !is_missing(op_.outputs[i])) operand(op_.outputs[i], name, extents, dtypes);
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

PackedHeads::PackedHeads(const Attributes& attributes)
    : heads(attributes.integer("heads")),
      kv_heads(attributes.integer("kv_heads")),
      head_dim(attributes.integer("head_dim")) {}

void check_packed(OperandCheck& check, const OpInstance& op, std::size_t i, const char* name) {
  const PackedHeads packed(op.attributes);
  check.that(packed.heads > 0 && packed.kv_heads > 0 && packed.head_dim > 0,
             "needs heads, kv_heads and head_dim above 0");
  check.input(i, name, {matrix_of(op, i).rows, packed.packed()});
}

void check_rope(OperandCheck& check, const OpInstance& op, std::size_t i) {
  const std::int64_t head_dim = op.attributes.integer("head_dim");
  for (const char* name : {"inverse_frequencies", "long_inverse_frequencies"}) {
    if (name != std::string_view("inverse_frequencies") && !op.attributes.has(name)) continue;
    const auto frequencies = static_cast<std::int64_t>(op.attributes.list(name).size());
    check.that(2 * frequencies == head_dim, std::string("needs head_dim / 2 ") + name + ": found " +
                                                std::to_string(frequencies) + " for head_dim " +
                                                std::to_string(head_dim));
  }
  check.that(op.attributes.has("long_beyond") == op.attributes.has("long_inverse_frequencies"),
             "has one of long_beyond and long_inverse_frequencies");
  check.input(i, "positions", {matrix_of(op, 0).rows}, DType::i32);
}

}  // namespace quern::operands
