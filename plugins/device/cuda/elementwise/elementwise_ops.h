#pragma once
// The elementwise families, one source each; add_elementwise_ops of kernels.h adds them all.

#include "runtime/kernels.h"

namespace quern::cuda {

void add_swiglu_ops(OpTable& table);  // swiglu, swiglu_grad, swiglu_and_grad
void add_dropout_ops(OpTable& table);
void add_column_sum_op(OpTable& table);
void add_reduce_ranks_op(OpTable& table);
void add_sum_tree_op(OpTable& table);

}  // namespace quern::cuda
