#pragma once
// Factored accumulators (gemm_scale_factors.cuh) of operands that both have scales of 128 x 128 elements. Scales are
// powers of two, and neighbours often have the same: where the ratios of all of a tile's are one, wgmmas follow each
// other as if there were one scale (but not where an Epilogue works behind stages).

#include "products/own/gemm_scale_factors.cuh"

namespace quern::cuda::gemm {

/// Of each 32 columns of a tile. A thread of the warp that writes them has the scales
/// of 32 columns.
template <int kColumns>
struct TileScaleFactors {
  static constexpr int kWriters = 1, kCount = kColumns / 32, kAhead = 3;
  static constexpr std::uint32_t kBytes = 4 * 8;
  float at[8];

  static __device__ __forceinline__ TileScaleFactors read(std::uint32_t from) {
    const float4 low = read_factors(from), high = read_factors(from + 16);
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  }
  /// The same in all threads.
  __device__ __forceinline__ bool all_one() const {
    bool one = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) one = one && at[i] == 1.0f;
    return one;
  }
  __device__ __forceinline__ void scale(float (&sums)[kColumns / 2]) const {
    wgmma::pin(sums);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sums[i] *= at[i / 16];
  }

  struct Scales {
    float a, b;
    __device__ __forceinline__ Scales over(const Scales& next) const {
      return {__fdividef(a, next.a), __fdividef(b, next.b)};
    }
    __device__ __forceinline__ void write(std::uint32_t to, const Scales& ratio, int thread) const {
      if (thread >= 8) return;
      put(to + 4 * thread, ratio.a * ratio.b);
      put(to + kBytes + 4 * thread, a * b);
    }
  };
  struct Source {
    const Operands& o;
    int a, b;  ///< places
    __device__ __forceinline__ Source(const Operands& o, const WorkTile& item, int thread)
        : o(o),
          a(square_of(o.scale_a, item.row(0))),
          b(square_of_column<kColumns>(o, item, min(32 * thread, kColumns - 32))) {}
    __device__ __forceinline__ Scales at(int block) const {
      return {scale_at(o.scale_a, a, block), scale_at(o.scale_b, b, block)};
    }
  };
};

template <class Formats, Rows kLayoutA, Columns kLayoutB = Columns::k_major>
using TileScalesMainloop = FactoredMainloop<Formats, TileScaleFactors, kLayoutA, kLayoutB>;

}  // namespace quern::cuda::gemm
