#pragma once
// One row of a matrix held in registers by a team of threads: what norms over channels are made of. A block is (team,
// teams) threads, each team takes every gridDim.x * teams-th row, thread t of it packs t, t + team, t + 2 team, ...
// The layout depends on the columns and the element type alone, so a fused kernel sums in the order of the plain one.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "elementwise/column_sums.h"
#include "primitives/vector.cuh"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"

namespace quern::cuda {

/// How many threads share a row, rows of a block, and packs of a thread, which kernels are instantiated for.
struct RowShape {
  int team = 32, teams = 8, packs = 1;
  dim3 block() const { return dim3(static_cast<unsigned>(team), static_cast<unsigned>(teams)); }
};

inline constexpr std::int64_t kMostPacks = 8 * 512;  ///< of a row
template <int kPacks>
inline constexpr int kRowThreads = kPacks == 8 ? 512 : 256;  ///< most threads of a block

/// The shape for rows of `columns` elements of `type`, which fits_row made sure of.
inline RowShape row_shape(std::int64_t columns, DType type) {
  auto packs = static_cast<int>(ceil_divide(columns * static_cast<std::int64_t>(size_of(type)), 16));
  auto team_of = [packs](int each) { return static_cast<int>(ceil_divide(ceil_divide(packs, each), 32)) * 32; };
  if (packs <= 32) return {32, 8, 1};
  if (packs <= 4 * 256) return {team_of(4), 256 / team_of(4), 4};
  return {team_of(8), 1, 8};
}
inline bool fits_row(const OpInstance& op, std::size_t input) {
  if (input >= op.inputs.size()) return false;
  return matrix_of(op, input).columns * static_cast<std::int64_t>(size_of(op.inputs[input].dtype)) <= 16 * kMostPacks;
}
/// Why a row that does not fit is refused.
inline constexpr const char* kRowTooLong = "on cuda takes rows of up to 64 KiB";

/// Calls visit(packs) with the shape's number of packs as a constant.
template <class Visit>
decltype(auto) with_packs(const RowShape& shape, Visit&& visit) {
  if (shape.packs == 1) return visit(std::integral_constant<int, 1>{});
  if (shape.packs == 4) return visit(std::integral_constant<int, 4>{});
  return visit(std::integral_constant<int, 8>{});
}

/// Bytes of the partial rows of sums over `rows` tokens: one a block.
inline std::size_t row_partial_bytes(std::int64_t rows, std::int64_t columns, DType type) {
  std::int64_t blocks = ceil_divide(rows, row_shape(columns, type).teams);
  return partial_bytes(std::max<std::int64_t>(1, std::min(blocks, kMostPartials)), columns);
}

/// A kernel for rows that can be read by packs, and for those that cannot.
template <class Arguments>
struct RowKernels {
  LoadedKernel<Arguments> vector, scalar;
  bool whole = false;  ///< rows hold whole packs
  int teams = 1;

  const LoadedKernel<Arguments>& pick(std::initializer_list<const void*> pointers) const {
    return whole && aligned_16(pointers) ? vector : scalar;
  }
  /// Blocks that the whole GPU runs at once of either.
  int resident() const { return std::min(vector.resident, scalar.resident); }
};

/// `select(T{}, packs, access)`, the last two integral constants, gives the instantiations of a kernel.
template <class Arguments, class Select>
RowKernels<Arguments> load_rows(std::int64_t columns, DType type, int multiprocessors, Select select) {
  const RowShape shape = row_shape(columns, type);
  const bool whole = columns * static_cast<std::int64_t>(size_of(type)) % 16 == 0;
  return with_element(type, [&](auto element) {
    return with_packs(shape, [&](auto packs) {
      KernelFunction<Arguments> vector = select(element, packs, AccessConstant<Access::vector>{});
      KernelFunction<Arguments> scalar = select(element, packs, AccessConstant<Access::scalar>{});
      return RowKernels<Arguments>{load_kernel(vector, shape.block(), multiprocessors),
                                   load_kernel(scalar, shape.block(), multiprocessors), whole, shape.teams};
    });
  });
}

/// Where this thread's pack number p begins.
template <class T>
__device__ __forceinline__ int pack_at(int p) {
  return (p * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kPack<T>;
}

/// A row's packs of this thread.
template <Access kAccess, int kPacks, class T>
__device__ __forceinline__ void load_row(Pack<T> (&packs)[kPacks], const T* row, int columns) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) packs[p] = load_pack<kAccess>(row, pack_at<T>(p), columns);
}

template <Access kAccess, int kPacks, class T>
__device__ __forceinline__ void store_row(const Pack<T> (&packs)[kPacks], T* row, int columns) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) store_pack<kAccess>(row, pack_at<T>(p), columns, packs[p]);
}

/// Shared memory of team_sums: a number for each warp of each team.
template <int kSums = 1>
struct TeamScratch {
  float warp[kSums][8][16];
};

/// Turns each of `values` into its sum over the row's threads. All threads of the block call it together.
template <int kSums>
__device__ __forceinline__ void team_sums(float (&values)[kSums], TeamScratch<kSums>& scratch) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  }
  if (blockDim.x == 32) return;
  const int warps = static_cast<int>(blockDim.x) / 32;
  __syncthreads();  // no thread reads the last sums any more
#pragma unroll
  for (int sum = 0; sum < kSums; ++sum) {
    if (threadIdx.x % 32 == 0) scratch.warp[sum][threadIdx.y][threadIdx.x / 32] = values[sum];
    values[sum] = 0;
  }
  __syncthreads();
  for (int warp = 0; warp < warps; ++warp) {
#pragma unroll
    for (int sum = 0; sum < kSums; ++sum) values[sum] += scratch.warp[sum][threadIdx.y][warp];
  }
}

/// The sum of one.
__device__ __forceinline__ float team_sum(float value, TeamScratch<>& scratch) {
  float values[] = {value};
  team_sums(values, scratch);
  return values[0];
}

/// The largest `value` of the row's threads, of non-negative ones, likewise.
__device__ __forceinline__ float team_max(float value, TeamScratch<>& scratch) {
  value = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(value)));
  if (blockDim.x == 32) return value;
  const int warps = static_cast<int>(blockDim.x) / 32;
  __syncthreads();  // no thread reads the last numbers any more
  if (threadIdx.x % 32 == 0) scratch.warp[0][threadIdx.y][threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < warps; ++warp) value = fmaxf(value, scratch.warp[0][threadIdx.y][warp]);
  return value;
}

/// The place of four columns in a team's row of store_block_sums's shared memory: writers of packs hit all banks.
__device__ __forceinline__ int sums_place(int four) { return four ^ (four >> 3 & 1); }

/// Sums over rows that threads gathered for their own columns: the block's total goes to `to` (columns). `shared` holds
/// a row for each team; a block of one team needs none. All threads of the block call it together.
template <class T, int kPacks, int kShared>
__device__ __forceinline__ void store_block_sums(const Floats<T> (&sums)[kPacks], float4 (&shared)[kShared], float* to,
                                                 int columns) {
  if (kShared == 1 || blockDim.y == 1) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i)
        if (pack_at<T>(p) + i < columns) to[pack_at<T>(p) + i] = sums[p].at[i];
    }
    return;
  }
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  const int fours = static_cast<int>(blockDim.x) * kPacks * kPack<T> / 4;  // of a team's row

  __syncthreads();  // no thread reads an earlier total any more
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
#pragma unroll
    for (int i = 0; i < kPack<T>; i += 4)
      shared[static_cast<int>(threadIdx.y) * fours + sums_place((pack_at<T>(p) + i) / 4)] =
          make_float4(sums[p].at[i], sums[p].at[i + 1], sums[p].at[i + 2], sums[p].at[i + 3]);
  }
  __syncthreads();
  for (int four = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); 4 * four < columns; four += threads) {
    float total[4] = {};
    for (int team = 0; team < static_cast<int>(blockDim.y); ++team) {
      const float4 part = shared[team * fours + sums_place(four)];
      total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (4 * four + i < columns) to[4 * four + i] = total[i];
  }
}

/// Of store_block_sums's shared memory: a block of several teams has at most 256 threads.
template <class T, int kPacks>
inline constexpr int kBlockSums = kPacks == 8 ? 1 : 256 * kPacks* kPack<T> / 4;

}  // namespace quern::cuda
