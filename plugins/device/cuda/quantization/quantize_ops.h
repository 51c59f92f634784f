#pragma once
// Ops that quantize to 8 bits, one source a producer; add_quantize_ops of kernels.h adds them all.

#include <vector>

#include "runtime/kernels.h"

namespace quern::cuda {

void add_quantize_columns_ops(OpTable& table);  // quantize_columns, quantize_rows_columns
void add_quantize_blocks_op(OpTable& table);
void add_weight_ops(OpTable& table);  // quantize_weights, dequantize_weights, requantize_weights
void add_observe_op(OpTable& table);  // observe_scale
void add_amax_op(OpTable& table);
void add_swiglu_quantize_ops(OpTable& table);       // swiglu_quantize..., swiglu_grad_quantize...
void add_norm_quantize_ops(OpTable& table);         // rms_norm_..., add_rms_norm_..., rms_norm_grad_add_quantize...
void add_norm_quantize_blocks_ops(OpTable& table);  // [add_]rms_norm_quantize_blocks, ..._squares
void add_rope_quantize_ops(OpTable& table);         // rope_grad_quantize..., rope_grad_column_sum_quantize...

/// Of quantize_amax: makes the scale, which `codes` then uses.
Launch scale_first(const OpInstance& op, CudaContext& context, Launch codes);

/// Patterns of every producer followed by every way to quantize, for Device::fusions.
std::vector<Fusion> quantize_fusions();

}  // namespace quern::cuda
