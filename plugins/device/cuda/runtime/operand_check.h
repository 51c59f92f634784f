#pragma once
// Plan-time checks of an op instance on this device. Kernels are built for fp32 and for bf16 operands, one type for all
// activations and weights of an op; sums into a gradient may be of either.

#include "shared/operands/operand_check.h"

namespace quern::cuda {

using operands::check_rope, operands::extents_of, operands::Matrix, operands::matrix_of, operands::PackedHeads;

struct OperandCheck : operands::OperandCheck {
  /// Input `element` has the type that all others share.
  OperandCheck(const OpInstance& op, std::size_t inputs, std::size_t outputs, std::size_t element = 0)
      : operands::OperandCheck(op, inputs, outputs, type_of(op, element), {{DType::f32, DType::bf16}, "f32 or bf16"}) {
    const DType type = type_of(op, element);
    that(type == DType::f32 || type == DType::bf16,
         "on cuda takes f32 or bf16 operands, found " + std::string(name_of(type)));
  }

 private:
  static DType type_of(const OpInstance& op, std::size_t element) {
    return element < op.inputs.size() ? op.inputs[element].dtype : DType::f32;
  }
};

}  // namespace quern::cuda
