#pragma once
// The ops of 8-bit GEMMs that quantize SwiGLU, or its gradient: their common part.

#include "products/swiglu/swiglu_epilogues.cuh"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"

namespace quern::cuda {

struct QuantizedSizes {
  std::int64_t rows, width, depth;  ///< width: of the gate
};

/// Inputs by pattern: a, b, their scales, for the gradient gate_up. Outputs: the matmul, the values, these quantized.
struct QuantizedForm {
  bool gradient;

  static constexpr std::size_t kGateUp = 4;
  std::size_t inputs() const { return gradient ? 5 : 4; }
  QuantizedSizes sizes(const OpInstance& op) const {
    const Matrix a = matrix_of(op, 0), b = matrix_of(op, 1);
    return {a.rows, gradient ? b.rows : b.rows / 2, a.columns};
  }
  /// Of the quantized matrix.
  Matrix values(const QuantizedSizes& s) const { return {s.rows, gradient ? 2 * s.width : s.width}; }
};

/// What the kernels take: widths that are multiples, and a least K.
struct QuantizedLeast {
  std::int64_t width, depth;
};

/// All but a's format, scales, and the outputs beside the values.
inline void check_quantized_matmul(OperandCheck& check, const OpInstance& op, const CudaTraits& gpu, QuantizedForm form,
                                   const QuantizedLeast& least) {
  using gemm::kMostElements;
  const auto [rows, width, depth] = form.sizes(op);
  auto flag = [&op](const char* name) { return op.attributes.integer_or(name, 0) != 0; };
  check.that(gpu.wgmma, "in one kernel needs Hopper's own instructions")
      .that(!flag("transpose_a") && flag("transpose_b"), "in one kernel takes K-major operands")
      .that(flag("fast_accumulation"), "in one kernel accumulates in fewer bits than fp32")
      .that(gpu.products != ProductChoice::library, "in one kernel needs own GEMMs, which the config excludes")
      .that(rows > 0 && width > 0 && width % least.width == 0 && depth % 16 == 0,
            "in one kernel takes rows, sums over a multiple of 16 and a width that is a multiple of " +
                std::to_string(least.width))
      .that(depth >= least.depth, "in one kernel takes sums over " + std::to_string(least.depth) + " terms or more")
      .that(rows < kMostElements && depth < kMostElements && 2 * width < kMostElements &&
                ceil_divide(rows, gemm::kRows) * ceil_divide(width, 128) < kMostElements,
            "in one kernel takes sizes below 2^30");
  check.input(0, "a", {rows, depth}, check.ok() ? op.inputs[0].dtype : DType::e4m3)
      .input(1, "b", {form.gradient ? width : 2 * width, depth}, DType::e4m3);
  if (form.gradient) check.input(QuantizedForm::kGateUp, "gate_up", {rows, 2 * width}, DType::bf16);
  check.output(0, "y", {rows, form.gradient ? width : 2 * width}, DType::bf16)
      .output(1, "values", {rows, form.gradient ? 2 * width : width}, DType::bf16);
  if (check.ok()) check.that(!form.gradient || !op.outputs[0].present, "in one kernel does not write dy");
}

}  // namespace quern::cuda
