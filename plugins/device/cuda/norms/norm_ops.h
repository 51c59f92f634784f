#pragma once
// The norm families, one source each; add_norm_ops of kernels.h adds them all.

#include <cstdint>

#include "runtime/kernels.h"
#include "runtime/operand_check.h"

namespace quern::cuda {

/// Blocks of rms_norm's gradient for a matrix of `type`: as many with the add as without, quantized or not, and at any
/// address, so that sums over tokens have one order in all its forms.
std::int64_t rms_norm_grad_blocks(const Matrix& size, DType type, int multiprocessors);

/// Of rms_norm, or of add_rms_norm, as the launch's first inputs and outputs say; y may be null.
Launch prepare_rms_norm(const OpInstance& op, CudaContext& context, bool added);

void add_rms_norm_ops(OpTable& table);    // rms_norm, rms_norm_grad, add_rms_norm, rms_norm_grad_add
void add_layer_norm_ops(OpTable& table);  // layer_norm, layer_norm_grad, add_layer_norm, layer_norm_grad_add
void add_head_norm_ops(OpTable& table);   // head_norm, head_norm_grad, head_norm_rope, rope_grad_head_norm_grad

}  // namespace quern::cuda
