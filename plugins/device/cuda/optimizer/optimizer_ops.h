#pragma once
// The ops of an optimizer step, one source each; add_optimizer_ops of kernels.h adds them all.

#include "runtime/kernels.h"

namespace quern::cuda {

void add_adamw_op(OpTable& table);

}  // namespace quern::cuda
