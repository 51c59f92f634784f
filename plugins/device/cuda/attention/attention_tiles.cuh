#pragma once
// What attention's kernels on Hopper share: tiles of 64 rows, of boxes of 64 columns, and the
// accumulators of a warpgroup.

#include <cstdint>

#include "primitives/element.cuh"
#include "primitives/tma.cuh"
#include "primitives/wgmma.cuh"

namespace quern::cuda::attention_tiles {

inline constexpr int kGroups = 2;  ///< warpgroups that multiply
inline constexpr int kTile = 64;   ///< rows that one of them keeps
inline constexpr int kThreads = 128 * (kGroups + 1);
inline constexpr float kLog2e = 1.44269504088896340736f;

/// Who has read the stage that a warp releases: only its wgmmas, or its threads by loads of their own.
enum class ReadBy : std::uint8_t { products, threads };

/// All of a warp are done with what a barrier guards.
template <ReadBy kBy>
__device__ __forceinline__ void release(std::uint32_t barrier) {
  if constexpr (kBy == ReadBy::threads) tma::fence_copies();
  tma::arrive_as_warp(barrier);
}

__device__ __forceinline__ float exp2_approximately(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float4 load_shared(std::uint32_t address) {
  float4 values;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "r"(address));
  return values;
}

/// Row of a warpgroup's sums that this thread has, besides that and 8 more, and its first column of each 8.
__device__ __forceinline__ int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int column() { return threadIdx.x % 4 * 2; }

/// Rows [0, rows) of a warpgroup's sums, each half times its factor, to rows `pitch` elements apart.
template <int kHead>
__device__ void store_rows(bf16* to, std::int64_t pitch, int rows, const float (&sums)[kHead / 2], float2 factors) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row() + 8 * half >= rows) continue;
    const float factor = half == 0 ? factors.x : factors.y;
    bf16* at = to + (row() + 8 * half) * pitch + column();
#pragma unroll
    for (int j = 0; j < kHead / 8; ++j)
      *reinterpret_cast<__nv_bfloat162*>(at + 8 * j) =
          __floats2bfloat162_rn(sums[4 * j + 2 * half] * factor, sums[4 * j + 2 * half + 1] * factor);
  }
}

/// A range of tiles of kStep rows that some of a tile's rows attend to, or that attend to them. Tiles in [whole,
/// whole_end) have no masked pair.
template <int kStep>
struct Span {
  int first, end, whole, whole_end;
  /// Of `rows` rows from `begin` on, by their ranges.
  __device__ __forceinline__ static Span of(const int2* ranges, int begin, int rows, int sequence) {
    const int2 low = __ldg(ranges + min(max(begin, 0), sequence - 1)),
               high = __ldg(ranges + min(max(begin + rows, 1), sequence) - 1);
    return {low.x / kStep, (high.y + kStep - 1) / kStep, (high.x + kStep - 1) / kStep, low.y / kStep};
  }
  __device__ __forceinline__ bool masked(int tile) const { return tile < whole || tile >= whole_end; }
};

}  // namespace quern::cuda::attention_tiles
