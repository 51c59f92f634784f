#pragma once
// Factored accumulators (gemm_scale_factors.cuh) of a first operand with scales of 128 elements of a row, behind whose
// stages an Epilogue works.

#include "products/own/gemm_scale_factors.cuh"

namespace quern::cuda::gemm {

/// Of this thread's two rows, which are neighbours, and each 128 columns of a tile. A thread of the warps that write
/// them has the scales of two rows.
template <int kColumns>
struct RowScaleFactors {
  static_assert(kColumns % kScaleBlock == 0);
  static constexpr int kWriters = kRows / 2 / 32, kCount = kColumns / static_cast<int>(kScaleBlock);
  static constexpr int kAhead = 2;  ///< what registers there are for
  static constexpr std::uint32_t kOfRows = 4 * kRows, kBytes = kCount * kOfRows;
  float2 at[kCount];

  static __device__ __forceinline__ RowScaleFactors read(std::uint32_t from) {
    const int row =
        static_cast<int>(threadIdx.x) / 128 * kHalfRows + warp_row() + static_cast<int>(threadIdx.x) % 32 / 4 * 2;
    RowScaleFactors f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) f.at[i] = read_pair(from + i * kOfRows + 4 * row);
    return f;
  }
  __device__ __forceinline__ bool all_one() const { return false; }  // not looked for: so many are rarely all one
  __device__ __forceinline__ void scale(float (&sums)[kColumns / 2]) const {
    wgmma::pin(sums);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sums[i] *= i / 2 % 2 == 0 ? at[i / 64].x : at[i / 64].y;
  }

  struct Scales {
    float2 a;
    float b[kCount];
    __device__ __forceinline__ Scales over(const Scales& next) const {
      Scales ratio{{__fdividef(a.x, next.a.x), __fdividef(a.y, next.a.y)}, {}};
#pragma unroll
      for (int i = 0; i < kCount; ++i) ratio.b[i] = __fdividef(b[i], next.b[i]);
      return ratio;
    }
    __device__ __forceinline__ void write(std::uint32_t to, const Scales& ratio, int thread) const {
      ratio.put_at(to + 8 * thread);
      put_at(to + kBytes + 8 * thread);
    }
    __device__ __forceinline__ void put_at(std::uint32_t to) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) put(to + i * kOfRows, make_float2(a.x * b[i], a.y * b[i]));
    }
  };
  struct Source {
    const Operands& o;
    int a, b[kCount];  ///< places
    /// An even number of rows.
    __device__ __forceinline__ Source(const Operands& o, const WorkTile& item, int thread)
        : o(o), a(min(item.row(0) + 2 * thread, o.scale_a.count - 2)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) b[i] = square_of_column<kColumns>(o, item, i * static_cast<int>(kScaleBlock));
    }
    __device__ __forceinline__ Scales at(int block) const {
      Scales scales{*reinterpret_cast<const float2*>(&scale_at(o.scale_a, a, block)), {}};
#pragma unroll
      for (int i = 0; i < kCount; ++i) scales.b[i] = scale_at(o.scale_b, b[i], block);
      return scales;
    }
  };
};

template <class Formats>
using RowScalesMainloop = FactoredMainloop<Formats, RowScaleFactors, Rows::paired, Columns::dealt>;

}  // namespace quern::cuda::gemm
