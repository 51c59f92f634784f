#pragma once
// What the blocks of attention's gradient on Hopper share out: the arguments, pieces of work, and where their operands
// are in shared memory. attention_grad_wgmma.cu describes the whole.

#include <cstdint>

#include "attention/attention_tiles.cuh"

namespace quern::cuda::attention_grad {

using namespace attention_tiles;

inline constexpr std::uint32_t kBox = kTile * 128;  ///< bytes of a box, 64 columns

struct GradArguments {
  CUtensorMap qkv, dy;         ///< (B, S, columns) in boxes of 64 x 64
  const float2* statistics;    ///< (B, heads, tiles, 64): -logsumexp log2(e) and delta
  const int2 *keys, *queries;  ///< ranges, (B, S), of kernels with ranges
  bf16* dqkv;
  int* next;  ///< the next item
  int sequence, tiles, blocks, heads, kv_heads, group;
  int key_items, items;
  float scale;
  bool causal;
};

/// Shared memory, in bytes from an address that is a multiple of 1024.
template <int kHead>
struct Layout {
  static constexpr int kBoxes = kHead / wgmma::kColumns;
  static constexpr int kStages = kHead == 64 ? 6 : 4;
  static constexpr int kResidents = kHead == 64 ? 2 : 1;  ///< items whose operands that stay there is room for
  static constexpr std::uint32_t kTileBytes = kBoxes * kBox;
  static constexpr std::uint32_t kStatisticsBytes = kTile * sizeof(float2);
  static constexpr std::uint32_t kResident = 0;  ///< (items, 2, warpgroups, tile)
  static constexpr std::uint32_t kStage = kResident + kResidents * 2 * kGroups * kTileBytes;  ///< (stages, 2, tile)
  static constexpr std::uint32_t kStatistics = kStage + kStages * 2 * kTileBytes;
  static constexpr std::uint32_t kBarriers = kStatistics + kStages * kStatisticsBytes;
  static constexpr std::uint32_t kItem = kBarriers + 16 * (kStages + kResidents);
  static constexpr std::uint32_t kBytes = kItem + 16 + 1024;  ///< 1024: what alignment may take
};

/// Addresses of what Layout lays out.
template <int kHead>
struct Shared {
  using L = Layout<kHead>;
  std::uint32_t base;
  __device__ std::uint32_t resident(int place, int operand, int group) const {
    return base + L::kResident + ((place * 2 + operand) * kGroups + group) * L::kTileBytes;
  }
  __device__ std::uint32_t streamed(int operand, int stage) const {
    return base + L::kStage + (stage * 2 + operand) * L::kTileBytes;
  }
  __device__ std::uint32_t statistics(int stage) const { return base + L::kStatistics + stage * L::kStatisticsBytes; }
  __device__ std::uint32_t full(int stage) const { return base + L::kBarriers + 8 * stage; }
  __device__ std::uint32_t empty(int stage) const { return base + L::kBarriers + 8 * (L::kStages + stage); }
  __device__ std::uint32_t resident_full(int place) const { return base + L::kBarriers + 16 * L::kStages + 8 * place; }
  __device__ std::uint32_t resident_empty(int place) const { return resident_full(L::kResidents + place); }
  __device__ std::uint32_t item(int place) const { return base + L::kItem + 4 * place; }
};

/// A piece of work: 128 rows that stay, and tiles [first, end) of each of `heads` heads that stream by.
template <bool kRanges>
struct Item {
  __device__ __forceinline__ Item(const GradArguments& a, int index, bool keys) : keys(keys) {
    const int place = keys ? index : index - a.key_items, kind_heads = keys ? a.kv_heads : a.heads;
    // The longest of a head first: keys at the beginning, queries at the end.
    // Rows that fill no block are where there is least to attend to: keys at the end, queries at the beginning.
    const int block = place % a.blocks;
    tile = keys ? block * kGroups : a.tiles - (block + 1) * kGroups;
    const int of_batch = place / a.blocks;
    batch = of_batch / kind_heads;
    head = of_batch % kind_heads;
    if constexpr (kRanges) {
      const auto span = Span<kTile>::of(ranges(a), tile * kTile, kGroups * kTile, a.sequence);
      first = span.first;
      end = span.end;
    } else {
      first = keys && a.causal ? tile : 0;
      end = !keys && a.causal ? tile + kGroups : a.tiles;
    }
    heads = keys ? a.group : 1;
  }
  bool keys;
  int tile, batch, head, first, end, heads;  ///< tile: the first of its own rows, which may be below 0
  __device__ int tiles() const { return (end - first) * heads; }
  /// Of the rows of its sequence.
  __device__ const int2* ranges(const GradArguments& a) const {
    return (keys ? a.queries : a.keys) + std::int64_t{batch} * a.sequence;
  }
};

}  // namespace quern::cuda::attention_grad
