#pragma once
// How accumulators become values, in the registers of the consumers (gemm_wgmma.cuh). A thread's four of a
// group of 8 columns are rows r, r, r + 8, r + 8 and columns c, c + 1, c, c + 1, r = lane / 4, c = lane % 4 * 2.

#include <cuda_bf16.h>

#include <type_traits>

#include "primitives/element.cuh"

namespace quern::cuda::gemm {

/// What a thread has of two neighbouring columns for each of up to 32 groups of 8. Loaded when the tile begins, a
/// group in four by each lane, and passed on between lanes when the accumulators are there.
template <class T>
class OfColumns {
 public:
  /// `from` (columns), at an address of two elements; zero past the end.
  __device__ __forceinline__ void load(const T* from, int first, int columns) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first + 8 * (8 * i + lane / 4) + lane % 4 * 2;
      own_[i] = at < columns ? *reinterpret_cast<const Pair*>(from + at) : Pair{};
    }
  }
  __device__ __forceinline__ float2 at(int group) const {
    const int lane = group % 8 * 4 + static_cast<int>(threadIdx.x) % 4;
    const Pair& own = own_[group / 8];
    if constexpr (std::is_same_v<T, float>) {
      return {__shfl_sync(~0u, own.x, lane), __shfl_sync(~0u, own.y, lane)};
    } else {
      return __bfloat1622float2(__shfl_sync(~0u, own, lane));
    }
  }

 private:
  using Pair = std::conditional_t<std::is_same_v<T, float>, float2, __nv_bfloat162>;
  Pair own_[4];
};

struct Scales {
  const float *a, *b;  ///< (1) or, by row, (rows) and (columns); a single one may be null: 1
  const bf16* bias;    ///< (columns); null: none
  int rows, columns;   ///< of the result, columns even
  bool by_row;
};

/// Mainloop times scales, plus a bias.
class Scaled {
 public:
  __device__ explicit Scaled(const Scales& scales) : from_(scales) {
    if (!from_.by_row) factor_[0] = one(from_.a) * one(from_.b);
  }

  /// This warp's first row, and the first column of group 0.
  __device__ __forceinline__ void prepare(int row, int column) {
    if (from_.by_row) {
      const int r = row + static_cast<int>(threadIdx.x) % 32 / 4;
      factor_[0] = r < from_.rows ? from_.a[r] : 0.0f;
      factor_[1] = r + 8 < from_.rows ? from_.a[r + 8] : 0.0f;
      scales_.load(from_.b, column, from_.columns);
    }
    if (from_.bias != nullptr) bias_.load(from_.bias, column, from_.columns);
  }

  template <bool kByRow, bool kBias, class Sum>
  __device__ __forceinline__ void scale(int group, const Sum (&sums)[4], float (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = static_cast<float>(sums[i]) * factor_[kByRow ? i / 2 : 0];
    if constexpr (kByRow) {
      const float2 by = scales_.at(group);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] *= i % 2 == 0 ? by.x : by.y;
    }
    if constexpr (kBias) {
      const float2 add = bias_.at(group);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] += i % 2 == 0 ? add.x : add.y;
    }
  }

 private:
  __device__ static float one(const float* scale) { return scale != nullptr ? *scale : 1.0f; }

  const Scales& from_;
  float factor_[2] = {};
  OfColumns<float> scales_;
  OfColumns<bf16> bias_;
};

}  // namespace quern::cuda::gemm
