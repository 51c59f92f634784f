#pragma once
// Sums over tokens in two stages of fixed order: kernels leave one partial row a block in their workspace, then the
// partial rows are added column by column.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "quern/view.h"

namespace quern::cuda {

/// Partial rows that the norms' gradients leave at most, whatever the GPU: workspaces are planned without one. Column
/// sums leave one for every 128 tokens (column_sum_order.cuh), from 65537 tokens on more than this, and their workspace
/// grows with the tokens.
inline constexpr std::int64_t kMostPartials = 512;

constexpr std::size_t partial_bytes(std::int64_t partials, std::int64_t columns) {
  return static_cast<std::size_t>(partials * columns) * sizeof(float);
}

/// To be called by `prepare`.
void load_column_sums();

/// Writes to `sum` (f32 or bf16), or adds to it, the sums over `count` rows of `pitch` floats of their first
/// sum.count() columns. Ordered on `stream`.
void sum_partial_rows(const float* partials, std::int64_t count, std::int64_t pitch, const View& sum, bool accumulate,
                      cudaStream_t stream);

/// What one sum_partial_rows adds up.
struct PartialRows {
  const float* partials = nullptr;
  View sum;  ///< of nothing: left out
  bool accumulate = false;
};

/// The same of two sums over as many rows of the same pitch, in one launch: a second would cost as much as the first.
void sum_partial_rows(const PartialRows& first, const PartialRows& second, std::int64_t count, std::int64_t pitch,
                      cudaStream_t stream);

}  // namespace quern::cuda
