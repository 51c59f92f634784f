#pragma once
// Cases of every op of the vocabulary: odd sizes, fp32 and bf16, outputs written and added to, each tolerance with its
// reason. For comparisons of any device with the oracle; the conformance kit and the devices' own tests run them.

#include <span>

#include "quern/testkit/op_comparison.h"

namespace quern::testkit {

void matmul_cases(const OpRunner& runner);
void matmul_bias_cases(const OpRunner& runner);
void matmul_8bit_cases(const OpRunner& runner);
/// With a bias, added to y, with row and block scales, and of i8: optional for a device.
void matmul_8bit_form_cases(const OpRunner& runner);
void conversion_cases(const OpRunner& runner);   ///< transpose and cast, to the bit
void scaled_cast_cases(const OpRunner& runner);  ///< of bytes, to the bit

struct LossShape {
  std::int64_t tokens, width, vocabulary, chunk;
};
inline constexpr LossShape kLossShapes[] = {{5, 16, 37, 5}, {64, 32, 256, 64}, {50, 24, 1001, 16}};
void loss_cases(const OpRunner& runner, std::span<const LossShape> shapes);
/// Soft caps: in the loss, and of logits outside it.
void capped_logits_cases(const OpRunner& runner, std::span<const LossShape> shapes);
void loss_stats_cases(const OpRunner& runner);
void loss_stats_grad_cases(const OpRunner& runner);

void token_rows_cases(const OpRunner& runner);  ///< prepend, row_mean
void class_loss_cases(const OpRunner& runner);  ///< and weigh
void embedding_cases(const OpRunner& runner);
void rms_norm_cases(const OpRunner& runner);  ///< fused forms included, as the next two
void layer_norm_cases(const OpRunner& runner);
void head_cases(const OpRunner& runner);  ///< rope, head_norm
void elementwise_cases(const OpRunner& runner);
void reduce_ranks_cases(const OpRunner& runner);  ///< to the bit, as the next
void sum_tree_cases(const OpRunner& runner);
void norm_and_clip_cases(const OpRunner& runner);
void adamw_cases(const OpRunner& runner);
void adamw_list_cases(const OpRunner& runner);
void optimizer_cases(const OpRunner& runner);  ///< sgd, lion, schedule_free, exchange
void adamw_8bit_cases(const OpRunner& runner);
void stacked_matmul_cases(const OpRunner& runner);
void muon_cases(const OpRunner& runner);  ///< beside its matmuls
void quantize_cases(const OpRunner& runner);
void amax_cases(const OpRunner& runner);
void quantize_blocks_cases(const OpRunner& runner);
void weight_format_cases(const OpRunner& runner);
void observe_scale_cases(const OpRunner& runner);
void quantize_special_cases(const OpRunner& runner);  ///< zeros, infinities, NaN

}  // namespace quern::testkit
