#pragma once
// How CPU kernels are found: each op family (one .cpp a family) adds its kinds to a table. A kernel is a closure made
// once per op instance, holding what it precomputed.

#include <functional>
#include <map>
#include <span>
#include <string>

#include "quern/device.h"

namespace quern::cpu {

/// Runs one op instance to completion, on the calling thread and the OpenMP team that this thread was given.
using Launch = std::function<void(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec)>;

struct CpuOp {
  std::function<Launch(const OpInstance&)> prepare;
  /// Refusal or workspace; empty: every instance is supported without workspace.
  std::function<OpSupport(const OpInstance&)> query;
};
using OpTable = std::map<std::string, CpuOp, std::less<>>;

void add_matmul_ops(OpTable& table);
void add_stacked_matmul_op(OpTable& table);
void add_conversion_ops(OpTable& table);  // transpose, cast
void add_quantize_ops(OpTable& table);    // to 8-bit formats, and the scales' histories
void add_quantize_blocks_op(OpTable& table);
void add_weight_ops(OpTable& table);  // of quern/weight_format.h
void add_observe_op(OpTable& table);  // observe_scale
void add_embedding_ops(OpTable& table);
void add_norm_ops(OpTable& table);  // rms_norm, layer_norm, head_norm, their gradients and fused forms
void add_rope_ops(OpTable& table);
void add_attention_ops(OpTable& table);
void add_narrow_matmul_ops(OpTable& table);  // add_matmul, columns_matmul, columns_weight_grad
void add_elementwise_ops(OpTable& table);    // add, swiglu, gelu, column_sum and fused forms
void add_reduction_ops(OpTable& table);      // reduce_ranks, sum_tree
void add_loss_ops(OpTable& table);           // lm_loss, lm_loss_train, loss_stats
void add_token_rows_ops(OpTable& table);     // between tokens and rows, losses of rows
void add_optimizer_ops(OpTable& table);      // sum_squares, clip_scale, and updates

}  // namespace quern::cpu
