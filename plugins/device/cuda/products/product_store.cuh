#pragma once
// A Finish of products (product_wgmma.cuh) that scales sums, rounds them to bf16 and writes them or adds them to what
// is there. Each warp that multiplies puts its own rows into shared memory, 64 columns at a time, from where TMA takes
// them while the warp goes on. The sums of tiles taken in parts are written as they are, and another kernel adds the
// parts in their order.

#include "products/product_scaling.cuh"
#include "products/product_wgmma.cuh"

namespace quern::cuda::product {

inline constexpr int kChunk = 8;                                ///< groups of 8 columns that are written at a time
inline constexpr std::uint32_t kChunkBytes = 16 * kChunk * 16;  ///< of a warp's 16 rows of them

struct Destination {
  CUtensorMap y[2];  ///< (rows, columns) in boxes of 16 rows and of 64 columns, or of 32
  bool add;          ///< values are rounded before, as the library's are
  Scales scales;
  void* parts;  ///< sums of tiles in parts, as threads have them: 32 bits each, in groups of four
};

/// Calls f(by_row, bias) with what scales are as constants, so that code for one case has no branches for others.
template <class Function>
__device__ __forceinline__ void with_form(const Scales& scales, Function f) {
  const bool bias = scales.bias != nullptr;
  if (scales.by_row)
    bias ? f(std::true_type{}, std::true_type{}) : f(std::true_type{}, std::false_type{});
  else
    bias ? f(std::false_type{}, std::true_type{}) : f(std::false_type{}, std::false_type{});
}

/// Puts groups [first, first + groups) of a warp's sums, 8 or 4 and 16 rows, into shared memory as their map has them.
template <bool kByRow, bool kBias, class Sum, int kCount>
__device__ __forceinline__ void put_chunk(const Scaled& scaling, std::uint32_t memory, const Sum (&sums)[kCount],
                                          int first, int groups) {
  const int lane = static_cast<int>(threadIdx.x) % 32, r = lane % 16;
#pragma unroll
  for (int j = 0; j < kChunk; j += 2) {
    if (j >= groups) break;
    float values[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = 4 * (first + j + i);
      const Sum of[4] = {sums[from], sums[from + 1], sums[from + 2], sums[from + 3]};
      float made[4];
      scaling.template scale<kByRow, kBias>(first + j + i, of, made);
#pragma unroll
      for (int v = 0; v < 4; ++v) values[4 * i + v] = made[v];
    }
    const int pack = j + lane / 16, at = groups == kChunk ? r * kChunk + (pack ^ r % 8) : r * groups + pack;
    wgmma::store_rounded(memory + at * 16, values);
  }
}

/// From there to y, by one thread: 16 rows from `row` on, columns from `column` on.
__device__ __forceinline__ void send_chunk(const Destination& to, std::uint32_t memory, int groups, int row,
                                           int column) {
  const CUtensorMap& y = to.y[groups == kChunk ? 0 : 1];
  if (to.add)
    tma::add_box(y, column, row, 0, memory);
  else
    tma::store_box(y, column, row, 0, memory);
}

/// Where a multiplier's sums of a part begin, in groups of four: of part `number`, one such group of all its threads
/// after another.
__host__ __device__ inline std::int64_t part_start(int number, int rank, int multiplier, int groups) {
  return ((static_cast<std::int64_t>(number) * kCluster + rank) * kMultipliers + multiplier) * groups * 128;
}
template <class Sum>
struct alignas(16) Four {
  Sum at[4];
};

/// `kBuffers` chunks of a warp fit into shared memory.
template <class Sum, int kTileColumns, int kBuffers>
class Stored {
 public:
  using Memory = Shared<kTileColumns, 4, kBuffers * kChunkBytes * 4 * kMultipliers>;
  static_assert(Memory::kBytes <= 232448, "what a block can have");
  using Arguments = Destination;
  static constexpr int kWidth = kTileColumns, kGroups = kTileColumns / 8;
  static constexpr bool kAssists = false;
  static constexpr int kSums = kTileColumns / 2;

  __device__ Stored(const Arguments& arguments, const Memory& memory, int multiplier)
      : to_(arguments),
        scaling_(arguments.scales),
        multiplier_(multiplier),
        chunks_(memory.results() + threadIdx.x / 32 * kBuffers * kChunkBytes) {}

  __device__ __forceinline__ void prepare(const Item& item) {
    if (item.part < 0) scaling_.prepare(item.row(multiplier_) + warp_row(), item.column * kWidth);
  }

  __device__ __forceinline__ void take(const Item& item, const Sum (&sums)[kSums]) {
    if (item.part >= 0) return write_part(item, sums);
    with_form(to_.scales, [&](auto by_row, auto bias) { store<by_row(), bias()>(item, sums); });
  }
  __device__ void end() { tma::wait_stores_read(); }

 private:
  template <bool kByRow, bool kBias>
  __device__ __forceinline__ void store(const Item& item, const Sum (&sums)[kSums]) {
    const bool one = threadIdx.x % 32 == 0;
    const int row = item.row(multiplier_) + warp_row(), column = item.column * kWidth;
    constexpr int kAtOnce = kBuffers * kChunk;
#pragma unroll
    for (int begin = 0; begin < kGroups; begin += kAtOnce) {
      if (one) tma::wait_stores_read();
      __syncwarp();
#pragma unroll
      for (int first = begin; first < min(begin + kAtOnce, kGroups); first += kChunk)
        put_chunk<kByRow, kBias>(scaling_, chunk(first - begin), sums, first, min(kChunk, kGroups - first));
      tma::fence_copies();
      __syncwarp();
      if (!one) continue;
#pragma unroll
      for (int first = begin; first < min(begin + kAtOnce, kGroups); first += kChunk)
        send_chunk(to_, chunk(first - begin), min(kChunk, kGroups - first), row, column + first * 8);
      tma::commit_stores();
    }
  }
  __device__ std::uint32_t chunk(int group) const { return chunks_ + group / kChunk * kChunkBytes; }

  __device__ __forceinline__ void write_part(const Item& item, const Sum (&sums)[kSums]) {
    auto* to = static_cast<Four<Sum>*>(to_.parts) +
               part_start(item.part, static_cast<int>(tma::cluster_rank()), multiplier_, kGroups) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) to[j * 128] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
  }

  const Arguments& to_;
  Scaled scaling_;
  int multiplier_;
  std::uint32_t chunks_;
};

/// Adds the parts of `grid`, whose tiles have `groups` groups of columns: a block takes one multiplier's rows of a
/// chunk of columns.
template <class Sum>
__global__ void __launch_bounds__(128) add_parts_kernel(const __grid_constant__ Destination to, Grid grid, int groups) {
  __shared__ alignas(1024) unsigned char memory[4 * kChunkBytes];
  const int chunks = (groups + kChunk - 1) / kChunk, divided = grid.tiles() - grid.whole;
  const int block = static_cast<int>(blockIdx.x), of_rows = block / chunks;
  const int first = block % chunks * kChunk, multiplier = of_rows % kMultipliers;
  const int rank = of_rows / kMultipliers % kCluster, tile = of_rows / (kMultipliers * kCluster);
  const Item item = grid.of_tile(grid.whole + tile);
  const int row = (item.row_pair * kCluster + rank) * kRows + multiplier * kHalfRows + warp_row();
  const int column = (item.column * groups + first) * 8, count = min(kChunk, groups - first);
  Sum sums[4 * kChunk] = {};
#pragma unroll 4
  for (int part = 0; part < grid.parts; ++part) {
    const auto* from = static_cast<const Four<Sum>*>(to.parts) +
                       part_start(part * divided + tile, rank, multiplier, groups) + first * 128 + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      if (j >= count) break;
      const Four<Sum> more = from[j * 128];
#pragma unroll
      for (int v = 0; v < 4; ++v) sums[4 * j + v] += more.at[v];
    }
  }
  Scaled scaling(to.scales);
  scaling.prepare(row, column);
  const std::uint32_t chunk = tma::shared_address(memory) + threadIdx.x / 32 * kChunkBytes;
  with_form(to.scales, [&](auto by_row, auto bias) { put_chunk<by_row(), bias()>(scaling, chunk, sums, 0, count); });
  tma::fence_copies();
  __syncwarp();
  if (threadIdx.x % 32 > 0) return;
  send_chunk(to, chunk, count, row, column);
  tma::commit_stores();
  tma::wait_stores_read();
}

}  // namespace quern::cuda::product
