#pragma once
// Plan-time checks of an op instance on this device, which takes every real dtype.

#include "shared/operands/operand_check.h"

namespace quern::cpu {

using operands::check_packed, operands::check_rope, operands::extents_of, operands::Matrix, operands::matrix_of,
    operands::NormedHeads, operands::PackedHeads;

struct OperandCheck : operands::OperandCheck {
  OperandCheck(const OpInstance& op, std::size_t inputs, std::size_t outputs)
      : operands::OperandCheck(op, inputs, outputs, real(), real()) {}

 private:
  static operands::Dtypes real() {
    return {{DType::f64, DType::f32, DType::bf16, DType::e4m3, DType::e5m2, DType::i8}, "a real dtype"};
  }
};

}  // namespace quern::cpu
