#pragma once
// Operands of the ops that every device checks alike. A device adds what its own kernels cannot take.

#include "shared/operands/operand_check.h"

namespace quern::operands {

/// Of rms_norm, or of layer_norm where `layer`; where `added`, of its form that adds first. The check expects
/// 2 + layer + added inputs and as many outputs.
void check_norm(OperandCheck& check, const OpInstance& op, bool layer, bool added);
/// Of its gradient; where `added`, the form that adds last. 4 + layer + added inputs, 2 + layer + added outputs.
void check_norm_grad(OperandCheck& check, const OpInstance& op, bool layer, bool added);

/// Checks all operands of head_norm, or of head_norm_rope where `rotated`.
void check_head_norm(OperandCheck& check, const OpInstance& op, bool rotated);
/// Of head_norm_grad, or of rope_grad_head_norm_grad where `rotated`.
void check_head_norm_grad(OperandCheck& check, const OpInstance& op, bool rotated);

/// Sizes of add_matmul, columns_matmul and columns_weight_grad: `columns` of a matrix (rows, width), from `first` on,
/// and a matrix (rows, rank).
struct NarrowMatmul {
  explicit NarrowMatmul(const OpInstance& op);
  std::int64_t rows = 0, width = 0, first = 0, columns = 0, rank = 0;
  bool turned = false;  ///< the weight is (columns, rank), else (rank, columns)
  float factor = 1;
};
OperandCheck check_narrow_matmul(OperandCheck check, const OpInstance& op);
/// Pairs of f32 tensors of equal extents; any even number of operands.
void check_exchange(OperandCheck& check, const OpInstance& op);
/// Of adamw, sgd, lion and schedule_free: of each of n objects gradient, master and `states`. The check expects 2 + (2
/// + states) * n inputs and (1 + states) * n outputs.
void check_element_update(OperandCheck& check, const OpInstance& op, std::size_t states);
/// Of adamw_8bit: of each object gradient, master, moments, and scales of those in 8 bits.
void check_adamw_8bit(OperandCheck& check, const OpInstance& op);
void check_muon_direction(OperandCheck& check, const OpInstance& op);
/// The check expects 4 inputs, or 5 where there are factors.
void check_muon_apply(OperandCheck& check, const OpInstance& op);
void check_row_factors(OperandCheck& check, const OpInstance& op);
void check_over_norm(OperandCheck& check, const OpInstance& op);
/// Sizes of stacked_matmul: `count` times y (m, n), contracted over k.
struct StackedMatmul {
  explicit StackedMatmul(const OpInstance& op);
  std::int64_t count = 0, m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false, adds = false;
  float alpha = 1, beta = 0;
};
/// The check expects 2 inputs, or 3 where there is a c.
void check_stacked_matmul(OperandCheck& check, const OpInstance& op);
/// Of prepend and row_mean, or of their gradients. The check expects the operands that ops.md lists. The tokens that
/// they are about follow from the geometry and the attributes.
struct TokenRows {
  explicit TokenRows(const OpInstance& op);
  std::int64_t rows = 0, sequence = 0, columns = 0;
  std::int64_t first = 0, count = 0;  ///< tokens of each row: added ones, or the mean's
};
OperandCheck check_token_rows(OperandCheck check, const OpInstance& op);
/// Of class_loss or its gradient.
OperandCheck check_class_loss(OperandCheck check, const OpInstance& op);
/// Of quantize_weights, dequantize_weights and requantize_weights.
void check_weight_format(OperandCheck& check, const OpInstance& op);
OperandCheck check_clip_scale(const OpInstance& op);
OperandCheck check_reduce_ranks(const OpInstance& op);
OperandCheck check_sum_tree(const OpInstance& op);
OpSupport query_observe_scale(const OpInstance& op);

}  // namespace quern::operands
