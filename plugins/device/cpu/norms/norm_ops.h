#pragma once
// The norm families, one source each; add_norm_ops of kernels.h adds them all.

#include "runtime/kernels.h"

namespace quern::cpu {

void add_rms_norm_ops(OpTable& table);    // rms_norm, rms_norm_grad, add_rms_norm, rms_norm_grad_add
void add_layer_norm_ops(OpTable& table);  // layer_norm, layer_norm_grad, add_layer_norm, layer_norm_grad_add
void add_head_norm_ops(OpTable& table);   // head_norm, head_norm_grad, head_norm_rope, rope_grad_head_norm_grad

}  // namespace quern::cpu
