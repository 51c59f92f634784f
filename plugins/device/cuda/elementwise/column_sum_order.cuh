#pragma once
// The order in which the columns of a matrix are summed, one for column_sum and for the kernels that sum what they
// make, so that fusing changes no bit. Tiles of 128 rows leave a partial row each (column_sums.h). A tile is summed as
// TileThread's threads are placed on it: each adds its 4 rows in order; a warp's four groups are added by pairs, which
// makes a strand of 16 rows; the 8 strands are added in order. A row past the end counts as zero.

#include "elementwise/column_sums.h"
#include "primitives/byte_tile.cuh"
#include "runtime/launch.cuh"

namespace quern::cuda {

/// Partial rows of a sum over so many rows.
constexpr std::int64_t sum_tiles(std::int64_t rows) { return ceil_divide(rows, kTileSide); }

/// Adds a row to a thread's sums, which begin at zero.
template <int kCount>
__device__ __forceinline__ void add_row(float (&sums)[kCount], const float (&row)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] += row[i];
}

/// A tile's strands, in shared memory.
template <int kColumns>
struct ColumnStrands {
  float at[kTileThreads / 32][kColumns];

  /// Columns [column, column + kCount) of the tile, summed over the thread's rows; a warp calls it together. Every
  /// exchange leaves a thread with half of its columns.
  template <int kCount>
  __device__ __forceinline__ void put(const TileThread& thread, int column, const float (&sums)[kCount]) {
    constexpr int kHalf = kCount / 2, kQuarter = kCount / 4;
    const bool odd = thread.row_group % 2 != 0, upper = thread.row_group % 4 >= 2;
    float pairs[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i)
      pairs[i] = (odd ? sums[kHalf + i] : sums[i]) + __shfl_xor_sync(~0u, odd ? sums[i] : sums[kHalf + i], 8);
    float* to = &at[thread.row_group / 4][column + (odd ? kHalf : 0) + (upper ? kQuarter : 0)];
#pragma unroll
    for (int i = 0; i < kQuarter; ++i)
      to[i] =
          (upper ? pairs[kQuarter + i] : pairs[i]) + __shfl_xor_sync(~0u, upper ? pairs[i] : pairs[kQuarter + i], 16);
  }

  /// A column's sum over the tile, once all strands are there.
  __device__ __forceinline__ float total(int column) const {
    float total = 0;
#pragma unroll
    for (int strand = 0; strand < kTileThreads / 32; ++strand) total += at[strand][column];
    return total;
  }
};

}  // namespace quern::cuda
