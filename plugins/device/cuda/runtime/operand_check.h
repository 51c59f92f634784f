#pragma once
// Plan-time checks of an op instance. Kernels are built for fp32 and for bf16 operands, one type for all activations
// and weights of an op; sums into a gradient may be of either. The first fault found becomes the refusal that people
// read.

#include <string>

#include "quern/device.h"

namespace quern::cuda {

class OperandCheck {
 public:
  /// Expects that many operands; input `element` has the type that all others share. `op` must outlive the check.
  OperandCheck(const OpInstance& op, std::size_t inputs, std::size_t outputs, std::size_t element = 0);

  /// An operand must have these extents and the op's element type, or `dtype`; outputs cannot be added to.
  OperandCheck& input(std::size_t i, const char* name, const Extents& extents);
  OperandCheck& output(std::size_t i, const char* name, const Extents& extents);
  OperandCheck& input(std::size_t i, const char* name, const Extents& extents, DType dtype);
  OperandCheck& output(std::size_t i, const char* name, const Extents& extents, DType dtype);
  /// An output of fp32 or bf16 that may be added to.
  OperandCheck& sum(std::size_t i, const char* name, const Extents& extents);
  OperandCheck& that(bool holds, const std::string& otherwise);

  bool ok() const { return refusal_.empty(); }
  OpSupport support(std::size_t workspace_bytes = 0) const { return {refusal_, ok() ? workspace_bytes : 0}; }

 private:
  void operand(const Operand& operand, const char* name, const Extents& extents, DType dtype);

  const OpInstance& op_;
  DType element_ = DType::f32;
  std::string refusal_;
};

/// Extents of input i; empty when there is none, so that shapes can be named before they are checked.
Extents extents_of(const OpInstance& op, std::size_t input);
/// Product of all dimensions but the last, and the last; (0, 0) when there is no such input.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
};
Matrix matrix_of(const OpInstance& op, std::size_t input);

}  // namespace quern::cuda
