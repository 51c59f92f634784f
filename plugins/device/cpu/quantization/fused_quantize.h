#pragma once
// Fused forms of an op that makes a matrix and the quantization of that matrix, one after the other: on the CPU nothing
// is gained, but the same programs run as on devices where it is.

#include <span>

#include "runtime/kernels.h"

namespace quern::cpu {

/// The fusions: each producer with each way to quantize, longer patterns first.
std::span<const Fusion> quantize_fusions();

/// Adds their kinds; the parts' kinds must be in the table.
void add_fused_quantize_ops(OpTable& table);

}  // namespace quern::cpu
