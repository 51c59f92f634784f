#pragma once
// The rotations, one source each; add_rope_ops of kernels.h adds them all.

#include "runtime/kernels.h"

namespace quern::cuda {

void add_rope_grad_column_sum_op(OpTable& table);

/// Whether a quantized tile (quantization/tile_quantize.cuh) is made of whole heads, so that a thread has both halves.
constexpr bool rope_quantizes_pairs(std::int64_t head_dim) {
  return head_dim > 0 && head_dim % 16 == 0 && 128 % head_dim == 0;
}

}  // namespace quern::cuda
