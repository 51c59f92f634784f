#pragma once
// How the sums of a product become values, in the registers of who multiplies (product_wgmma.cuh):
//
//   struct Arguments;                                        // of the kernel
//   void prepare(int row, int column);                       // a tile begins: this warp's first row, the tile's column
//   void scale(int j, const Sum (&sums)[4], float (&values)[4]) const;  // columns [8 j, 8 j + 8) of the tile
//
// A thread's four are rows r, r, r + 8, r + 8 and columns c, c + 1, c, c + 1 of these, r = lane / 4, c = lane % 4 * 2.

#include <cuda_bf16.h>

#include <type_traits>

#include "primitives/element.cuh"

namespace quern::cuda::product {

struct AsSummed {
  struct Arguments {};
  __device__ explicit AsSummed(const Arguments&) {}
  __device__ void prepare(int, int) {}
  __device__ __forceinline__ void scale(int, const float (&sums)[4], float (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = sums[i];
  }
};

/// What a thread has of two neighbouring columns for each of the tile's 32 groups of 8. Loaded when the tile begins, a
/// group in four by each lane, and passed on between lanes when the sums are there.
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
  int rows, columns;   ///< of the product, columns even
};

/// Sums times scales, plus a bias: one scale of each operand, or one a row and one a column (`kByRow`).
template <bool kByRow>
class Scaled {
 public:
  using Arguments = Scales;

  __device__ explicit Scaled(const Arguments& arguments) : from_(arguments) {
    if constexpr (!kByRow) factor_[0] = one(from_.a) * one(from_.b);
  }

  __device__ __forceinline__ void prepare(int row, int column) {
    if constexpr (kByRow) {
      const int r = row + static_cast<int>(threadIdx.x) % 32 / 4;
      factor_[0] = r < from_.rows ? from_.a[r] : 0.0f;
      factor_[1] = r + 8 < from_.rows ? from_.a[r + 8] : 0.0f;
      scales_.load(from_.b, column * kTileColumns, from_.columns);
    }
    if (from_.bias != nullptr) bias_.load(from_.bias, column * kTileColumns, from_.columns);
  }

  template <class Sum>
  __device__ __forceinline__ void scale(int group, const Sum (&sums)[4], float (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = static_cast<float>(sums[i]) * factor_[kByRow ? i / 2 : 0];
    if constexpr (kByRow) {
      const float2 by = scales_.at(group);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] *= i % 2 == 0 ? by.x : by.y;
    }
    if (from_.bias != nullptr) {
      const float2 add = bias_.at(group);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] += i % 2 == 0 ? add.x : add.y;
    }
  }

 private:
  static constexpr int kTileColumns = 256;
  __device__ static float one(const float* scale) { return scale != nullptr ? *scale : 1.0f; }

  const Arguments& from_;
  float factor_[2] = {};
  OfColumns<float> scales_;
  OfColumns<bf16> bias_;
};

}  // namespace quern::cuda::product
