#pragma once
// The ops of an optimizer step, one source each; add_optimizer_ops of kernels.h adds them all.

#include "runtime/kernels.h"

namespace quern::cuda {

void add_element_update_ops(OpTable& table);  // adamw, sgd, lion, schedule_free, exchange
void add_adamw_8bit_op(OpTable& table);
void add_muon_ops(OpTable& table);  // muon_direction, over_norm, row_factors, muon_apply

}  // namespace quern::cuda
