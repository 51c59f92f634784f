#pragma once
// An Epilogue of GEMMs (gemm_wgmma.cuh) that scales accumulators, rounds them to bf16 and writes or adds them to y.
// Each consumer warp puts its own rows into shared memory, 64 columns at a time, from where TMA takes
// them while the warp goes on. Accumulators of tiles under split-K are written unscaled, and another kernel adds the
// splits in order.

#include "products/own/gemm_scaling.cuh"
#include "products/own/gemm_wgmma.cuh"

namespace quern::cuda::gemm {

inline constexpr int kChunk = 8;                                ///< groups of 8 columns that are written at a time
inline constexpr std::uint32_t kChunkBytes = 16 * kChunk * 16;  ///< of a warp's 16 rows of them

/// The layout of a warp's accumulators in y. If the first operand is not K-major (wgmma::TransposedA), they have rows r
/// and r + 8 side by side there.
enum class OutputLayout {
  straight,
  paired,      ///< the operand not K-major
  transposed,  ///< the same, and y (columns, rows)
};

struct Destination {
  /// (rows, columns) in boxes of 16 rows and of 64 columns, or of 32. Transposed: (columns, rows) in boxes of 64 rows
  /// of the result, which a consumer has, and of 64 columns, or of 32.
  CUtensorMap y[2];
  bool add;  ///< values are rounded before, as the library's are
  Scales scales;
  void* parts;  ///< accumulators of tiles under split-K, as threads have them: 32 bits each, in groups of four
};

/// Calls f(by_row, bias) with the kind of scales as constants, so that code for one case has no branches for others.
template <class Function>
__device__ __forceinline__ void with_form(const Scales& scales, Function f) {
  const bool bias = scales.bias != nullptr;
  if (scales.by_row)
    bias ? f(std::true_type{}, std::true_type{}) : f(std::true_type{}, std::false_type{});
  else
    bias ? f(std::false_type{}, std::true_type{}) : f(std::false_type{}, std::false_type{});
}

/// Scales group `group` of a warp's accumulators.
template <bool kByRow, bool kBias, class Sum, int kCount>
__device__ __forceinline__ void scale_group(const Scaled& scaling, const Sum (&sums)[kCount], int group,
                                            float (&values)[4]) {
  const Sum of[4] = {sums[4 * group], sums[4 * group + 1], sums[4 * group + 2], sums[4 * group + 3]};
  scaling.template scale<kByRow, kBias>(group, of, values);
}

/// Puts groups [first, first + groups) of a warp's accumulators, 8 or 4 and 16 rows, into shared memory as their map
/// has them: of the warp, or where y is transposed of the consumer, whose warps' `memory` is one.
template <OutputLayout kOutputLayout, bool kByRow, bool kBias, class Sum, int kCount>
__device__ __forceinline__ void put_chunk(const Scaled& scaling, std::uint32_t memory, const Sum (&sums)[kCount],
                                          int first, int groups) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (kOutputLayout == OutputLayout::transposed) {
    const int pack = threadIdx.x % 128 / 32 * 2 + lane / 16, inside = lane / 4 % 4 * 4;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      if (j >= groups) break;
      float values[4];
      scale_group<kByRow, kBias>(scaling, sums, first + j, values);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane % 4 * 2 + i;
        wgmma::store_pair(memory + (8 * j + row) * 128 + (pack ^ row) * 16 + inside, values[i], values[2 + i]);
      }
    }
  } else {
    const int r = kOutputLayout == OutputLayout::paired ? lane % 8 * 2 + lane / 8 % 2 : lane % 16;
#pragma unroll
    for (int j = 0; j < kChunk; j += 2) {
      if (j >= groups) break;
      float values[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) scale_group<kByRow, kBias>(scaling, sums, first + j + i, values[i]);
      const int pack = j + lane / 16, at = groups == kChunk ? r * kChunk + (pack ^ r % 8) : r * groups + pack;
      wgmma::store_rounded(memory + at * 16, values);
    }
  }
}

/// From there to y, by one thread: rows from `row` on, columns from `column` on.
template <OutputLayout kOutputLayout>
__device__ __forceinline__ void send_chunk(const Destination& to, std::uint32_t memory, int groups, int row,
                                           int column) {
  const CUtensorMap& y = to.y[groups == kChunk ? 0 : 1];
  const int along = kOutputLayout == OutputLayout::transposed ? row : column,
            down = kOutputLayout == OutputLayout::transposed ? column : row;
  if (to.add)
    tma::add_box(y, along, down, 0, memory);
  else
    tma::store_box(y, along, down, 0, memory);
}

/// Who puts a chunk together, and sends it by its first thread: a warp, or a consumer's four.
template <OutputLayout kOutputLayout>
struct WriteGroup {
  int rank = static_cast<int>(threadIdx.x) % (kOutputLayout == OutputLayout::transposed ? 128 : 32);
  __device__ void synchronize() const {
    if constexpr (kOutputLayout == OutputLayout::transposed)
      asm volatile("bar.sync %0, 128;" ::"r"(1 + static_cast<int>(threadIdx.x) / 128) : "memory");
    else
      __syncwarp();
  }
  /// The first row that it has, and its memory of `kBytes` for each warp.
  __device__ static int row() { return kOutputLayout == OutputLayout::transposed ? 0 : warp_row(); }
  template <std::uint32_t kBytes>
  __device__ static std::uint32_t memory() {
    return static_cast<std::uint32_t>(threadIdx.x) / (kOutputLayout == OutputLayout::transposed ? 128 : 32) *
           (kOutputLayout == OutputLayout::transposed ? 4 * kBytes : kBytes);
  }
};

/// Where a consumer's accumulators of a split begin, in groups of four: of part `number`, one such group of all its
/// threads after another.
__host__ __device__ inline std::int64_t part_start(int number, int rank, int consumer, int groups) {
  return ((static_cast<std::int64_t>(number) * kCluster + rank) * kConsumers + consumer) * groups * 128;
}
template <class Sum>
struct alignas(16) Four {
  Sum at[4];
};

/// With room for `kBuffers` chunks of each warp.
template <int kTileColumns, int kBuffers, int kLoaded = kTileColumns, std::uint32_t kBesideBytes = 0>
struct StoredMemory : Shared<kTileColumns, kBuffers * kChunkBytes * 4 * kConsumers, kLoaded, kBesideBytes> {
  static constexpr int kChunks = kBuffers;
};

template <class Sum, OutputLayout kOutputLayout, class OfMemory>
class StoreEpilogue {
 public:
  using Memory = OfMemory;
  using Arguments = Destination;
  static constexpr int kWidth = Memory::kColumns, kGroups = kWidth / 8;
  static __device__ bool idle(const Arguments&) { return false; }
  static constexpr int kAccumulators = kWidth / 2;

  __device__ StoreEpilogue(const Arguments& arguments, const Memory& memory, int consumer)
      : to_(arguments),
        scaling_(arguments.scales),
        consumer_(consumer),
        chunks_(memory.results() + WriteGroup<kOutputLayout>::template memory<Memory::kChunks * kChunkBytes>()) {}

  __device__ __forceinline__ void prepare(const WorkTile& item) {
    if (item.part < 0) scaling_.prepare(item.row(consumer_) + warp_row(), item.column * kWidth);
  }

  __device__ __forceinline__ void take(const WorkTile& item, const Sum (&sums)[kAccumulators]) {
    if (item.part >= 0) return write_part(item, sums);
    if constexpr (kOutputLayout == OutputLayout::straight)
      with_form(to_.scales, [&](auto by_row, auto bias) { store<by_row(), bias()>(item, sums); });
    else
      store<false, false>(item, sums);
  }
  __device__ void end() { tma::wait_stores_read(); }

 private:
  template <bool kByRow, bool kBias>
  __device__ __forceinline__ void store(const WorkTile& item, const Sum (&sums)[kAccumulators]) {
    const WriteGroup<kOutputLayout> team;
    const bool one = team.rank == 0;
    const int row = item.row(consumer_) + team.row(), column = item.column * kWidth;
    constexpr int kAtOnce = Memory::kChunks * kChunk;
#pragma unroll
    for (int begin = 0; begin < kGroups; begin += kAtOnce) {
      if (one) tma::wait_stores_read();
      team.synchronize();
#pragma unroll
      for (int first = begin; first < min(begin + kAtOnce, kGroups); first += kChunk)
        put_chunk<kOutputLayout, kByRow, kBias>(scaling_, chunk(first - begin), sums, first,
                                                min(kChunk, kGroups - first));
      tma::fence_copies();
      team.synchronize();
      if (!one) continue;
#pragma unroll
      for (int first = begin; first < min(begin + kAtOnce, kGroups); first += kChunk)
        send_chunk<kOutputLayout>(to_, chunk(first - begin), min(kChunk, kGroups - first), row, column + first * 8);
      tma::commit_stores();
    }
  }
  __device__ std::uint32_t chunk(int group) const {
    return chunks_ + group / kChunk * kChunkBytes * (kOutputLayout == OutputLayout::transposed ? 4 : 1);
  }

  __device__ __forceinline__ void write_part(const WorkTile& item, const Sum (&sums)[kAccumulators]) {
    auto* to = static_cast<Four<Sum>*>(to_.parts) +
               part_start(item.part, static_cast<int>(tma::cluster_rank()), consumer_, kGroups) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) to[j * 128] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
  }

  const Arguments& to_;
  Scaled scaling_;
  int consumer_;
  std::uint32_t chunks_;
};

/// Adds the parts of `grid`, whose tiles have `groups` groups of columns: a block takes one consumer's rows of a
/// chunk of columns.
template <class Sum, OutputLayout kOutputLayout>
__global__ void __launch_bounds__(128)
    add_split_k_kernel(const __grid_constant__ Destination to, Grid grid, int groups) {
  __shared__ alignas(1024) unsigned char memory[4 * kChunkBytes];
  const int chunks = (groups + kChunk - 1) / kChunk, divided = grid.tiles() - grid.whole;
  const int block = static_cast<int>(blockIdx.x), of_rows = block / chunks;
  const int first = block % chunks * kChunk, consumer = of_rows % kConsumers;
  const int rank = of_rows / kConsumers % kCluster, tile = of_rows / (kConsumers * kCluster);
  const WorkTile item = grid.of_tile(grid.whole + tile);
  const WriteGroup<kOutputLayout> team;
  const int half = (item.row_pair * kCluster + rank) * kRows + consumer * kHalfRows;
  const int column = (item.column * groups + first) * 8, count = min(kChunk, groups - first);
  Sum sums[4 * kChunk] = {};
#pragma unroll 4
  for (int part = 0; part < grid.parts; ++part) {
    const auto* from = static_cast<const Four<Sum>*>(to.parts) +
                       part_start(part * divided + tile, rank, consumer, groups) + first * 128 + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      if (j >= count) break;
      const Four<Sum> more = from[j * 128];
#pragma unroll
      for (int v = 0; v < 4; ++v) sums[4 * j + v] += more.at[v];
    }
  }
  Scaled scaling(to.scales);
  scaling.prepare(half + warp_row(), column);
  const std::uint32_t chunk = tma::shared_address(memory) + team.template memory<kChunkBytes>();
  if constexpr (kOutputLayout == OutputLayout::straight)
    with_form(to.scales, [&](auto by_row, auto bias) {
      put_chunk<kOutputLayout, by_row(), bias()>(scaling, chunk, sums, 0, count);
    });
  else
    put_chunk<kOutputLayout, false, false>(scaling, chunk, sums, 0, count);
  tma::fence_copies();
  team.synchronize();
  if (team.rank > 0) return;
  send_chunk<kOutputLayout>(to, chunk, count, half + team.row(), column);
  tma::commit_stores();
  tma::wait_stores_read();
}

}  // namespace quern::cuda::gemm
