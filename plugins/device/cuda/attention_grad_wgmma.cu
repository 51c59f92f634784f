// The gradient of attention on Hopper's tensor cores, without scores in memory. Blocks stay and take work items, first
// all of one kind and then all of the other:
//   keys     dk and dv of 128 keys of a key-value head: K and V stay, the (Q, dy) tiles of all its query heads stream
//   by queries  dq of 128 queries of a head: Q and dy stay, (K, V) tiles stream by
// Both make a tile of scores X = R1 S1^T and of P's gradient Y = R2 S2^T, rows being what stays, then P and dS = P (Y -
// delta) in registers, and add P S2 and dS S1 to their results. That is 7 products where keeping the sums of dq in
// memory would take 5, but every sum has one owner and one order: bits depend on nothing but a sequence's own operands.
// A warpgroup owns 64 rows. Tiles come by TMA into a ring of stages; a producer warp also draws the items. The products
// of the next tile's X and Y are issued before those that use this tile's P and dS, so that the tensor cores have work
// while exponentials are taken. Dao et al., "FlashAttention-2" (2023) and Shah et al., "FlashAttention-3" (2024).

#include <algorithm>

#include "attention.h"
#include "check.h"
#include "element.cuh"
#include "tensor_map.h"
#include "tma.cuh"
#include "vector.cuh"
#include "wgmma.cuh"

namespace quern::cuda {

namespace {

constexpr int kTile = 64;   ///< rows of a streamed tile, and of what one warpgroup keeps
constexpr int kGroups = 2;  ///< warpgroups that multiply
constexpr int kThreads = 128 * (kGroups + 1);
constexpr std::uint32_t kBox = kTile * 128;  ///< bytes of a box, 64 columns
constexpr std::size_t kCounterBytes = 256;
constexpr float kLog2e = 1.44269504088896340736f;

struct GradArguments {
  CUtensorMap qkv, dy;       ///< (B, S, columns) in boxes of 64 x 64
  const float2* statistics;  ///< (B, heads, tiles, 64): -logsumexp log2(e) and delta
  bf16* dqkv;
  int* next;  ///< the next item
  int sequence, tiles, blocks, heads, kv_heads, group;
  int key_items, items;
  float scale;
  bool causal;
};

// ---- statistics ----

struct StatisticsArguments {
  const bf16 *y, *dy;
  const float* logsumexp;  ///< (B, heads, S)
  float2* statistics;
  int* next;
  int batch, sequence, tiles, heads;
};

constexpr int kStatisticsThreads = 256;

/// delta = sum of dy * y over a head: what the softmax's normalisation takes from every key's gradient. Beyond a
/// sequence's end the statistics make probabilities zero.
template <int kHead>
__global__ void __launch_bounds__(kStatisticsThreads) statistics_kernel(const StatisticsArguments a) {
  constexpr int kLanes = kHead / kPack<bf16>, kRows = kStatisticsThreads / kLanes;
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.next = 0;
  const int chunks = a.tiles * kTile / kRows, lane = threadIdx.x % kLanes;
  const int batch = blockIdx.x / chunks, row = blockIdx.x % chunks * kRows + threadIdx.x / kLanes;
  const bool inside = row < a.sequence;
#pragma unroll 4
  for (int head = 0; head < a.heads; ++head) {
    float delta = 0;
    if (inside) {
      const std::int64_t at = ((std::int64_t{batch} * a.sequence + row) * a.heads + head) * kHead;
      const Floats<bf16> y = unpack(load_pack<Access::vector>(a.y + at, lane * kPack<bf16>, kHead));
      const Floats<bf16> dy = unpack(load_pack<Access::vector>(a.dy + at, lane * kPack<bf16>, kHead));
#pragma unroll
      for (int i = 0; i < kPack<bf16>; ++i) delta += y.at[i] * dy.at[i];
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) delta += __shfl_xor_sync(~0u, delta, offset);
    if (lane != 0) continue;
    const std::int64_t of_head = std::int64_t{batch} * a.heads + head;
    a.statistics[of_head * a.tiles * kTile + row] =
        make_float2(inside ? -kLog2e * a.logsumexp[of_head * a.sequence + row] : -INFINITY, delta);
  }
}

// ---- the gradients ----

/// Shared memory, in bytes from an address that is a multiple of 1024.
template <int kHead>
struct Layout {
  static constexpr int kBoxes = kHead / wgmma::kColumns;
  static constexpr int kGroups = 2;  ///< warpgroups that multiply
  static constexpr int kThreads = 128 * (kGroups + 1);
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

/// Where in the ring of stages a walk is.
template <int kStages>
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kHead>
struct Shared {
  using L = Layout<kHead>;
  std::uint32_t base;
  __device__ std::uint32_t resident(int place, int operand, int group) const {
    return base + L::kResident + ((place * 2 + operand) * L::kGroups + group) * L::kTileBytes;
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
template <int kGroups>
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
    first = keys && a.causal ? tile : 0;
    end = !keys && a.causal ? tile + kGroups : a.tiles;
    heads = keys ? a.group : 1;
  }
  bool keys;
  int tile, batch, head, first, end, heads;  ///< tile: the first of its own rows, which may be below 0
  __device__ int tiles() const { return (end - first) * heads; }
};

template <int kHead>
__device__ void load_tile(const Shared<kHead>& shared, const CUtensorMap& map, std::uint32_t to, int column, int row,
                          int batch, std::uint32_t barrier) {
#pragma unroll
  for (int box = 0; box < Layout<kHead>::kBoxes; ++box)
    tma::load_box(to + box * kBox, map, column + box * wgmma::kColumns, row, batch, barrier);
}

/// One thread: draws items and keeps the tiles coming.
template <int kHead>
__device__ void produce(const GradArguments& a, const Shared<kHead>& shared) {
  using L = Layout<kHead>;
  Ring<L::kStages> ring;
  for (Ring<L::kResidents> residents;; residents.advance()) {
    const int index = atomicAdd(a.next, 1), place = residents.stage;
    const std::uint32_t resident_full = shared.resident_full(place);
    tma::wait(shared.resident_empty(place), residents.parity ^ 1);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.item(place)), "r"(index) : "memory");
    if (index >= a.items) {
      tma::arrive(resident_full);
      return;
    }
    const Item<L::kGroups> item(a, index, index < a.key_items);
    const int kv_head = item.keys ? item.head : item.head / a.group;
    const int key = (a.heads + kv_head) * kHead, value = key + a.kv_heads * kHead;
    tma::arrive_expecting(resident_full, 2 * L::kGroups * L::kTileBytes);
    for (int group = 0; group < L::kGroups; ++group) {
      const int row = (item.tile + group) * kTile;
      load_tile(shared, a.qkv, shared.resident(place, 0, group), item.keys ? key : item.head * kHead, row, item.batch,
                resident_full);
      load_tile(shared, item.keys ? a.qkv : a.dy, shared.resident(place, 1, group),
                item.keys ? value : item.head * kHead, row, item.batch, resident_full);
    }
    for (int h = 0; h < item.heads; ++h) {
      const int head = item.head * a.group + h;
      const float2* statistics = a.statistics + (std::int64_t{item.batch} * a.heads + head) * a.tiles * kTile;
      for (int tile = item.first; tile < item.end; ++tile, ring.advance()) {
        const std::uint32_t full = shared.full(ring.stage);
        tma::wait(shared.empty(ring.stage), ring.parity ^ 1);
        tma::arrive_expecting(full, 2 * L::kTileBytes + (item.keys ? L::kStatisticsBytes : 0));
        load_tile(shared, a.qkv, shared.streamed(0, ring.stage), item.keys ? head * kHead : key, tile * kTile,
                  item.batch, full);
        load_tile(shared, item.keys ? a.dy : a.qkv, shared.streamed(1, ring.stage), item.keys ? head * kHead : value,
                  tile * kTile, item.batch, full);
        if (item.keys)
          tma::load_bytes(shared.statistics(ring.stage), statistics + tile * kTile, L::kStatisticsBytes, full);
      }
    }
  }
}

/// All of a warp are done with what a barrier guards.
__device__ __forceinline__ void release(std::uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) tma::arrive(barrier);
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

/// Rows [0, rows) of a warpgroup's sums, times `factor`, to rows `pitch` elements apart.
template <int kHead>
__device__ void store_rows(bf16* to, std::int64_t pitch, int rows, const float (&sums)[kHead / 2], float factor) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= rows) continue;
    bf16* at = to + (row + 8 * half) * pitch + column;
#pragma unroll
    for (int j = 0; j < kHead / 8; ++j)
      *reinterpret_cast<__nv_bfloat162*>(at + 8 * j) =
          __floats2bfloat162_rn(sums[4 * j + 2 * half] * factor, sums[4 * j + 2 * half + 1] * factor);
  }
}

/// A warpgroup's part of an item: the gradients of its 64 rows.
template <int kHead, bool kKeys>
class Part {
  using L = Layout<kHead>;
  static constexpr int kSteps = kHead / wgmma::kDepth, kTileSteps = kTile / wgmma::kDepth;
  /// Where registers suffice, what stays is held in them, and the scores of the next tile are made ahead.
  static constexpr bool kAhead = kHead == 64 || !kKeys;

 public:
  __device__ __forceinline__ Part(const GradArguments& arguments, const Shared<kHead>& shared,
                                  const Item<L::kGroups>& item, int place, int group)
      : a(arguments), shared(shared), item(item), place(place), group(group), mine(item.tile + group) {
    own_first = kKeys && a.causal ? max(item.first, mine) : item.first;
    own_end = !kKeys && a.causal ? min(item.end, mine + 1) : item.end;
    if (mine < 0 || mine >= a.tiles) own_end = own_first;
    tile = own_first;
    left = (own_end - own_first) * item.heads;
  }

  __device__ __forceinline__ void run(Ring<L::kStages>& ring) {
    if constexpr (kAhead) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        wgmma::load_a(held[0][step], shared.resident(place, 0, group) + step / 4 * kBox, step % 4);
        wgmma::load_a(held[1][step], shared.resident(place, 1, group) + step / 4 * kBox, step % 4);
      }
      release(shared.resident_empty(place));
    }
    if constexpr (!kKeys) load_row_statistics();
#pragma unroll
    for (int i = 0; i < kHead / 2; ++i) {
      first[i] = 0;
      if constexpr (kKeys) second[i] = 0;
    }
    wgmma::pin(first);
    if constexpr (kKeys) wgmma::pin(second);
    if (left == 0) {
      pass(ring, item.tiles());
    } else {
      pass(ring, own_first - item.first);
      kAhead ? walk_ahead(ring) : walk(ring);
    }
    if constexpr (!kAhead) release(shared.resident_empty(place));
    store();
  }

 private:
  /// Takes tiles that none of the rows attends to.
  __device__ void pass(Ring<L::kStages>& ring, int tiles) {
    for (; tiles > 0; --tiles, ring.advance()) {
      tma::wait(shared.full(ring.stage), ring.parity);
      release(shared.empty(ring.stage));
    }
  }
  __device__ __forceinline__ void advance(Ring<L::kStages>& ring) {
    --left;
    ring.advance();
    if (++tile != own_end) return;
    tile = own_first;
    pass(ring, item.end - own_end + (left > 0 ? own_first - item.first : 0));
  }
  /// Whether some of a tile's scores are not attended to.
  __device__ __forceinline__ bool masked(int current) const {
    return a.causal ? current == mine : !kKeys && current == a.tiles - 1;
  }

  __device__ __forceinline__ void walk_ahead(Ring<L::kStages>& ring) {
    tma::wait(shared.full(ring.stage), ring.parity);
    wgmma::fence();
    issue_scores<0>(x, ring.stage);
    issue_scores<1>(y, ring.stage);
    wgmma::commit();
    wgmma::commit();  // stands for the sums of a tile before
    int previous = -1, stage = 0;
    for (;;) {
      const int current = tile;
      stage = ring.stage;
      advance(ring);
      const bool ready = tma::done(shared.full(ring.stage), ring.parity);
      wgmma::wait<1>();
      wgmma::pin(x);
      wgmma::pin(y);
      if (masked(current)) mask(current);
      make_probabilities<0, 4>(stage);
      make_score_gradients<0, 4>(stage);
      wgmma::wait<0>();
      make_probabilities<4, 8>(stage);
      round<0, 2>();
      make_score_gradients<4, 8>(stage);
      round<2, 4>();
      if (previous >= 0) release(shared.empty(previous));
      if (left == 0) break;
      if (!ready) tma::wait(shared.full(ring.stage), ring.parity);
      wgmma::fence();
      issue_scores<0>(x, ring.stage);
      issue_scores<1>(y, ring.stage);
      wgmma::commit();
      issue_sums(stage);
      previous = stage;
    }
    wgmma::fence();
    issue_sums(stage);
    finish(stage);
  }
  __device__ __forceinline__ void walk(Ring<L::kStages>& ring) {
    int previous = -1;
    do {
      tma::wait(shared.full(ring.stage), ring.parity);
      const int current = tile, stage = ring.stage;
      wgmma::fence();
      issue_scores<0>(x, stage);
      wgmma::commit();
      wgmma::wait<0>();
      wgmma::pin(x);
      wgmma::fence();
      issue_scores<1>(y, stage);
      wgmma::commit();
      if (previous >= 0) release(shared.empty(previous));
      advance(ring);
      if (masked(current)) mask(current);
      make_probabilities<0, 8>(stage);
      wgmma::wait<0>();
      wgmma::pin(y);
      make_score_gradients<0, 8>(stage);
      round<0, 4>();
      wgmma::fence();
      issue_sums(stage);
      previous = stage;
    } while (left > 0);
    finish(previous);
  }
  __device__ __forceinline__ void finish(int stage) {
    wgmma::wait<0>();
    wgmma::pin(first);
    if constexpr (kKeys) wgmma::pin(second);
    release(shared.empty(stage));
  }

  template <int kOperand>
  __device__ __forceinline__ void issue_scores(float (&scores)[32], int stage) {
    const wgmma::Tile b = wgmma::along_rows(shared.streamed(kOperand, stage));
    const wgmma::Tile resident = wgmma::along_rows(shared.resident(place, kOperand, group));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint32_t at = step / 4 * kBox + step % 4 * 32;
      if constexpr (kAhead) {
        step == 0 ? wgmma::multiply<false, false>(scores, held[kOperand][step], b + at)
                  : wgmma::multiply<true, false>(scores, held[kOperand][step], b + at);
      } else {
        step == 0 ? wgmma::multiply<false>(scores, resident + at, b + at)
                  : wgmma::multiply<true>(scores, resident + at, b + at);
      }
    }
  }
  __device__ __forceinline__ void issue_sums(int stage) {
    const wgmma::Tile s1 = wgmma::across_rows<kBox>(shared.streamed(0, stage));
    const wgmma::Tile s2 = wgmma::across_rows<kBox>(shared.streamed(1, stage));
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
      const std::uint32_t at = step * wgmma::kDepth * 128;
      if constexpr (kKeys) wgmma::multiply<true, true>(second, p[step], s2 + at);
      wgmma::multiply<true, true>(first, ds[step], s1 + at);
    }
    wgmma::commit();
  }

  __device__ __forceinline__ void load_row_statistics() {
    const int held_tile = min(max(mine, 0), a.tiles - 1);
    const float2* from =
        a.statistics + ((std::int64_t{item.batch} * a.heads + item.head) * a.tiles + held_tile) * kTile;
    row_statistics[0] = from[row()];
    row_statistics[1] = from[row() + 8];
  }
  __device__ static int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
  __device__ static int column() { return threadIdx.x % 4 * 2; }

  /// Has exponentials make zeros of what is not attended to.
  __device__ __forceinline__ void mask(int current) {
    const int inside = a.sequence - current * kTile;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row() + i / 2 * 8, c = 8 * j + column() + i % 2;
        const bool attended = kKeys ? c >= r : c < (a.causal ? r + 1 : inside);
        if (!attended) x[4 * j + i] = -INFINITY;
      }
  }
  /// x, of eight columns each from `kFrom` on: scores to probabilities.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void make_probabilities(int stage) {
    const float factor = a.scale * kLog2e;
#pragma unroll
    for (int j = kFrom; j < kTo; ++j) {
      float4 columns;
      if constexpr (kKeys) columns = load_shared(shared.statistics(stage) + (8 * j + column()) * sizeof(float2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float shift = kKeys ? (i % 2 == 0 ? columns.x : columns.z) : row_statistics[i / 2].x;
        x[4 * j + i] = exp2_approximately(fmaf(x[4 * j + i], factor, shift));
      }
    }
  }
  /// y: gradients of probabilities to those of scores, without the scale.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void make_score_gradients(int stage) {
#pragma unroll
    for (int j = kFrom; j < kTo; ++j) {
      float4 columns;
      if constexpr (kKeys) columns = load_shared(shared.statistics(stage) + (8 * j + column()) * sizeof(float2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float delta = kKeys ? (i % 2 == 0 ? columns.y : columns.w) : row_statistics[i / 2].y;
        y[4 * j + i] = x[4 * j + i] * (y[4 * j + i] - delta);
      }
    }
  }
  template <int kFrom, int kTo>
  __device__ __forceinline__ void round() {
#pragma unroll
    for (int step = kFrom; step < kTo; ++step) {
      if constexpr (kKeys) wgmma::round_to_a(p[step], x, step);
      wgmma::round_to_a(ds[step], y, step);
    }
  }

  __device__ __forceinline__ void store() {
    const std::int64_t pitch = std::int64_t{a.heads + 2 * a.kv_heads} * kHead;
    const int rows = mine < 0 ? 0 : a.sequence - mine * kTile;
    bf16* to = a.dqkv + (std::int64_t{item.batch} * a.sequence + mine * kTile) * pitch + item.head * kHead;
    if constexpr (kKeys) {
      to += a.heads * kHead;
      store_rows<kHead>(to + a.kv_heads * kHead, pitch, rows, second, 1.0f);
    }
    store_rows<kHead>(to, pitch, rows, first, a.scale);
  }

  const GradArguments& a;
  const Shared<kHead>& shared;
  const Item<L::kGroups> item;
  const int place, group, mine;  ///< place: of the operands that stay; mine: the tile that this part's rows are
  int own_first, own_end;        ///< tiles that these rows attend to, of each head
  int tile, left;                ///< the next one, and how many there are in all heads
  std::uint32_t held[2][kAhead ? kSteps : 1][4];
  float x[32], y[32];
  float first[kHead / 2], second[kKeys ? kHead / 2 : 1];  ///< dk and dv, or dq
  std::uint32_t p[kTileSteps][4], ds[kTileSteps][4];
  float2 row_statistics[2];
};

/// Waits for the next item.
template <int kHead>
__device__ __forceinline__ int receive(const Shared<kHead>& shared, const Ring<Layout<kHead>::kResidents>& residents) {
  tma::wait(shared.resident_full(residents.stage), residents.parity);
  int index;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(index) : "r"(shared.item(residents.stage)) : "memory");
  return __shfl_sync(~0u, index, 0);  // the compiler sees: the same in a whole warp
}

template <int kHead>
__device__ __forceinline__ void consume(const GradArguments& a, const Shared<kHead>& shared) {
  using Work = Item<Layout<kHead>::kGroups>;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  Ring<Layout<kHead>::kStages> ring;
  Ring<Layout<kHead>::kResidents> residents;
  auto next = [&] {
    residents.advance();
    return receive(shared, residents);
  };
  int index = receive(shared, residents);
  for (; index < a.key_items; index = next())
    Part<kHead, true>(a, shared, Work(a, index, true), residents.stage, group).run(ring);
  for (; index < a.items; index = next())
    Part<kHead, false>(a, shared, Work(a, index, false), residents.stage, group).run(ring);
}

template <int kHead>
__global__ void __launch_bounds__(Layout<kHead>::kThreads, 1)
    attention_grad_kernel(const __grid_constant__ GradArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = Layout<kHead>;
  extern __shared__ unsigned char memory[];
  const Shared<kHead> shared{(tma::shared_address(memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * L::kGroups;
    for (int stage = 0; stage < L::kStages; ++stage) {
      tma::init(shared.full(stage), 1);
      tma::init(shared.empty(stage), kWarps);
    }
    for (int place = 0; place < L::kResidents; ++place) {
      tma::init(shared.resident_full(place), 1);
      tma::init(shared.resident_empty(place), kWarps);
    }
    tma::fence_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    if constexpr (L::kGroups == 3)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    else
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) produce<kHead>(a, shared);
  } else {
    if constexpr (L::kGroups == 3)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    else
      asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume<kHead>(a, shared);
  }
#endif
}

template <class F>
void with_head(const AttentionShape& s, F&& f) {
  s.head_dim == 64 ? f.template operator()<64>() : f.template operator()<128>();
}

int tiles_of(const AttentionShape& s) { return static_cast<int>((s.sequence + kTile - 1) / kTile); }

}  // namespace

std::size_t wgmma_attention_grad_workspace(const AttentionShape& s) {
  return kCounterBytes + static_cast<std::size_t>(s.batch * s.heads * tiles_of(s)) * kTile * sizeof(float2);
}

void load_wgmma_attention_grad(const AttentionShape& s) {
  with_head(s, [&]<int kHead>() {
    cudaFuncAttributes attributes;
    QUERN_CUDA(cudaFuncGetAttributes(&attributes, statistics_kernel<kHead>));  // loads the code
    QUERN_CUDA(cudaFuncSetAttribute(attention_grad_kernel<kHead>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(Layout<kHead>::kBytes)));
  });
}

void wgmma_attention_grad(const AttentionShape& s, const AttentionOperands& o, int multiprocessors,
                          cudaStream_t stream) {
  if (s.tokens() == 0) return;
  const int tiles = tiles_of(s);
  auto* next = static_cast<int*>(o.workspace);
  auto* statistics = reinterpret_cast<float2*>(static_cast<char*>(o.workspace) + kCounterBytes);
  with_head(s, [&]<int kHead>() {
    constexpr int kRows = kStatisticsThreads / (kHead / kPack<bf16>);
    const StatisticsArguments first{.y = static_cast<const bf16*>(o.y),
                                    .dy = static_cast<const bf16*>(o.dy),
                                    .logsumexp = o.logsumexp,
                                    .statistics = statistics,
                                    .next = next,
                                    .batch = static_cast<int>(s.batch),
                                    .sequence = static_cast<int>(s.sequence),
                                    .tiles = tiles,
                                    .heads = static_cast<int>(s.heads)};
    statistics_kernel<kHead>
        <<<static_cast<unsigned>(s.batch * tiles * (kTile / kRows)), kStatisticsThreads, 0, stream>>>(first);
    QUERN_CUDA(cudaGetLastError());
    constexpr int kGroups = Layout<kHead>::kGroups;
    const int blocks = (tiles + kGroups - 1) / kGroups;
    const int key_items = static_cast<int>(s.batch * s.kv_heads) * blocks;
    const GradArguments arguments{
        .qkv = tensor_map({s.packed(), s.sequence, s.batch}, o.qkv, {wgmma::kColumns, kTile, 1}),
        .dy = tensor_map({s.width(), s.sequence, s.batch}, o.dy, {wgmma::kColumns, kTile, 1}),
        .statistics = statistics,
        .dqkv = static_cast<bf16*>(o.dqkv),
        .next = next,
        .sequence = static_cast<int>(s.sequence),
        .tiles = tiles,
        .blocks = blocks,
        .heads = static_cast<int>(s.heads),
        .kv_heads = static_cast<int>(s.kv_heads),
        .group = static_cast<int>(s.heads / s.kv_heads),
        .key_items = key_items,
        .items = key_items + static_cast<int>(s.batch * s.heads) * blocks,
        .scale = s.scale,
        .causal = s.causal};
    const auto grid = static_cast<unsigned>(std::min(multiprocessors, arguments.items));
    attention_grad_kernel<kHead><<<grid, Layout<kHead>::kThreads, Layout<kHead>::kBytes, stream>>>(arguments);
    QUERN_CUDA(cudaGetLastError());
  });
}

}  // namespace quern::cuda
