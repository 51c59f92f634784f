#pragma once
// Where the inputs of lm_loss and lm_loss_train are.

#include <cstddef>

#include "quern/op_spec.h"

namespace quern::operands {

enum LossInput : std::size_t {
  kX,
  kWeight,
  kTargets,
  kXCodes,
  kXScale,
  kXTransposed,
  kWeightCodes,
  kWeightScale,
  kWeightTransposed,
  kInputsWithCodes
};

inline bool loss_is_quantized(const OpInstance& op) { return op.inputs.size() > kXCodes && op.inputs[kXCodes].present; }
/// The input that the matmuls read the weight from, whose extents are the vocabulary and the width.
inline std::size_t loss_weight_of(const OpInstance& op) { return loss_is_quantized(op) ? kWeightCodes : kWeight; }

}  // namespace quern::operands
