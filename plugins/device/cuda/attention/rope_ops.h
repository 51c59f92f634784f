#pragma once
// The rotations, one source each; add_rope_ops of kernels.h adds them all.

#include "runtime/kernels.h"

namespace quern::cuda {

void add_rope_grad_column_sum_op(OpTable& table);

}  // namespace quern::cuda
