#pragma once
// What launches take, for plans: shares of the rated peaks that kernels reached in whole steps on an H100 80GB HBM3,
// which other GPUs reach in the same proportion, but for GpuFacts::reach. docs/performance/estimates.md compares plans
// with measured steps.

#include "runtime/gpu_table.h"

namespace quern::cuda {

/// Seconds, about. The op is one that `query` accepts and does not call slow; a kind that is not known here takes the
/// time of its operands.
double launch_seconds(const OpInstance& op, const GpuFacts& gpu);
/// Of attention where `query` calls it slow: by CUDA cores (attention_own.cu).
double slow_launch_seconds(const OpInstance& op, const GpuFacts& gpu);

}  // namespace quern::cuda
