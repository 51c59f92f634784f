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
  CUtensorMap qkv, dy;      ///< (B, S, columns) in boxes of 64 x 64
  const float* statistics;  ///< (B, heads, tiles, 2, 64): -logsumexp log2(e), then delta
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
  float* statistics;
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
    float* out = a.statistics + ((of_head * a.tiles + row / kTile) * 2) * kTile + row % kTile;
    out[0] = inside ? -kLog2e * a.logsumexp[of_head * a.sequence + row] : -INFINITY;
    out[kTile] = delta;
  }
}

// ---- the gradients ----

/// Shared memory, in bytes from an address that is a multiple of 1024.
template <int kHead>
struct Layout {
  static constexpr int kBoxes = kHead / wgmma::kColumns;
  static constexpr int kStages = kHead == 64 ? 6 : 4;
  static constexpr std::uint32_t kTileBytes = kBoxes * kBox;
  static constexpr std::uint32_t kStatisticsBytes = 2 * kTile * sizeof(float);
  static constexpr std::uint32_t kResident = 0;                                  ///< (2, warpgroups, tile)
  static constexpr std::uint32_t kStage = kResident + 2 * kGroups * kTileBytes;  ///< (stages, 2, tile)
  static constexpr std::uint32_t kStatistics = kStage + kStages * 2 * kTileBytes;
  static constexpr std::uint32_t kBarriers = kStatistics + kStages * kStatisticsBytes;
  static constexpr std::uint32_t kItem = kBarriers + 8 * (2 * kStages + 2);
  static constexpr std::uint32_t kBytes = kItem + 16 + 1024;  ///< 1024: what alignment may take
};

template <int kHead>
struct Shared {
  using L = Layout<kHead>;
  std::uint32_t base;
  __device__ std::uint32_t resident(int operand, int group) const {
    return base + L::kResident + (operand * kGroups + group) * L::kTileBytes;
  }
  __device__ std::uint32_t streamed(int operand, int stage) const {
    return base + L::kStage + (stage * 2 + operand) * L::kTileBytes;
  }
  __device__ std::uint32_t statistics(int stage) const { return base + L::kStatistics + stage * L::kStatisticsBytes; }
  __device__ std::uint32_t full(int stage) const { return base + L::kBarriers + 8 * stage; }
  __device__ std::uint32_t empty(int stage) const { return base + L::kBarriers + 8 * (L::kStages + stage); }
  __device__ std::uint32_t resident_full() const { return base + L::kBarriers + 16 * L::kStages; }
  __device__ std::uint32_t resident_empty() const { return resident_full() + 8; }
  __device__ std::uint32_t item() const { return base + L::kItem; }
};

/// A piece of work: 128 rows that stay, and tiles [first, end) of each of `heads` heads that stream by.
struct Item {
  __device__ __forceinline__ Item(const GradArguments& a, int index, bool keys) : keys(keys) {
    const int place = keys ? index : index - a.key_items, kind_heads = keys ? a.kv_heads : a.heads;
    // The longest of a head first: keys at the beginning, queries at the end.
    block = place % a.blocks;
    if (!keys) block = a.blocks - 1 - block;
    const int of_batch = place / a.blocks;
    batch = of_batch / kind_heads;
    head = of_batch % kind_heads;
    first = keys && a.causal ? kGroups * block : 0;
    end = !keys && a.causal ? min(a.tiles, kGroups * (block + 1)) : a.tiles;
    heads = keys ? a.group : 1;
  }
  bool keys;
  int block, batch, head, first, end, heads;
  __device__ int tiles() const { return (end - first) * heads; }
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
  for (std::uint32_t parity = 0;; parity ^= 1) {
    const int index = atomicAdd(a.next, 1);
    tma::wait(shared.resident_empty(), parity ^ 1);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.item()), "r"(index) : "memory");
    if (index >= a.items) {
      tma::arrive(shared.resident_full());
      return;
    }
    const Item item(a, index, index < a.key_items);
    const int kv_head = item.keys ? item.head : item.head / a.group;
    const int key = (a.heads + kv_head) * kHead, value = key + a.kv_heads * kHead;
    tma::arrive_expecting(shared.resident_full(), 2 * kGroups * L::kTileBytes);
    for (int group = 0; group < kGroups; ++group) {
      const int row = (item.block * kGroups + group) * kTile;
      load_tile(shared, a.qkv, shared.resident(0, group), item.keys ? key : item.head * kHead, row, item.batch,
                shared.resident_full());
      load_tile(shared, item.keys ? a.qkv : a.dy, shared.resident(1, group), item.keys ? value : item.head * kHead, row,
                item.batch, shared.resident_full());
    }
    for (int h = 0; h < item.heads; ++h) {
      const int head = item.head * a.group + h;
      const float* statistics = a.statistics + (std::int64_t{item.batch} * a.heads + head) * a.tiles * 2 * kTile;
      for (int tile = item.first; tile < item.end; ++tile, ring.advance()) {
        const std::uint32_t full = shared.full(ring.stage);
        tma::wait(shared.empty(ring.stage), ring.parity ^ 1);
        tma::arrive_expecting(full, 2 * L::kTileBytes + (item.keys ? L::kStatisticsBytes : 0));
        load_tile(shared, a.qkv, shared.streamed(0, ring.stage), item.keys ? head * kHead : key, tile * kTile,
                  item.batch, full);
        load_tile(shared, item.keys ? a.dy : a.qkv, shared.streamed(1, ring.stage), item.keys ? head * kHead : value,
                  tile * kTile, item.batch, full);
        if (item.keys)
          tma::load_bytes(shared.statistics(ring.stage), statistics + tile * 2 * kTile, L::kStatisticsBytes, full);
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

__device__ __forceinline__ float2 load_pair(std::uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address));
  return pair;
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
  /// What stays is held in registers where there are enough; else read from shared memory every time.
  static constexpr bool kHeld = kHead == 64 || !kKeys;
  static constexpr bool kAhead = kHeld;

 public:
  __device__ Part(const GradArguments& arguments, const Shared<kHead>& shared, const Item& item, int group)
      : a(arguments), shared(shared), item(item), group(group), mine(item.block * kGroups + group) {}

  __device__ __forceinline__ void run(Ring<L::kStages>& ring) {
    if constexpr (kHeld) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        wgmma::load_a(held[0][step], shared.resident(0, group) + step / 4 * kBox, step % 4);
        wgmma::load_a(held[1][step], shared.resident(1, group) + step / 4 * kBox, step % 4);
      }
      release(shared.resident_empty());
    }
    load_row_statistics();
#pragma unroll
    for (int i = 0; i < kHead / 2; ++i) {
      first[i] = 0;
      if constexpr (kKeys) second[i] = 0;
    }
    wgmma::pin(first);
    wgmma::pin(second);
    tile = item.first;
    left = item.tiles();
    if (kAhead) {
      if (seek(ring)) walk_ahead(ring);
    } else {
      walk(ring);
    }
    if constexpr (!kHeld) release(shared.resident_empty());
    store();
  }

 private:
  __device__ __forceinline__ void round() {
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
      if constexpr (kKeys) wgmma::round_to_a(p[step], x, step);
      wgmma::round_to_a(ds[step], y, step);
    }
  }
  __device__ __forceinline__ void walk(Ring<L::kStages>& ring) {
    int previous = -1;
    for (; seek(ring); advance(ring)) {
      tma::wait(shared.full(ring.stage), ring.parity);
      wgmma::fence();
      issue_scores_of(x, 0, ring.stage);
      wgmma::wait<0>();
      wgmma::pin(x);
      wgmma::fence();
      issue_scores_of(y, 1, ring.stage);
      if (previous >= 0) release(shared.empty(previous));
      make_probabilities(tile, ring.stage);
      wgmma::wait<0>();
      wgmma::pin(y);
      make_score_gradients(ring.stage);
      round();
      issue_sums(ring.stage);
      previous = ring.stage;
    }
    wgmma::wait<0>();
    wgmma::pin(first);
    wgmma::pin(second);
    if (previous >= 0) release(shared.empty(previous));
  }
  /// From a first tile that is not skipped on.
  __device__ __forceinline__ void walk_ahead(Ring<L::kStages>& ring) {
    issue_scores(ring);
    wgmma::commit();  // stands for the sums of a tile before
    int previous = -1, stage = 0;
    for (;;) {
      const int current = tile;
      stage = ring.stage;
      advance(ring);
      const bool more = seek(ring);
      wgmma::wait<2>();
      wgmma::pin(x);
      make_probabilities(current, stage);
      wgmma::wait<1>();
      wgmma::pin(y);
      make_score_gradients(stage);
      wgmma::wait<0>();
      if (previous >= 0) release(shared.empty(previous));
      round();
      if (!more) break;
      issue_scores(ring);
      issue_sums(stage);
      previous = stage;
    }
    issue_sums(stage);
    wgmma::wait<0>();
    wgmma::pin(first);
    if constexpr (kKeys) wgmma::pin(second);
    release(shared.empty(stage));
  }

  /// Nothing of the tile is attended to.
  __device__ bool skips() const { return mine >= a.tiles || (a.causal && (kKeys ? tile < mine : tile > mine)); }
  __device__ void advance(Ring<L::kStages>& ring) {
    if (++tile == item.end) tile = item.first;
    --left;
    ring.advance();
  }
  /// Goes to the next tile that is not skipped; false when there is none.
  __device__ bool seek(Ring<L::kStages>& ring) {
    for (; left > 0; advance(ring)) {
      if (!skips()) return true;
      tma::wait(shared.full(ring.stage), ring.parity);
      release(shared.empty(ring.stage));
    }
    return false;
  }

  __device__ __forceinline__ void issue_scores(const Ring<L::kStages>& ring) {
    tma::wait(shared.full(ring.stage), ring.parity);
    wgmma::fence();
    issue_scores_of(x, 0, ring.stage);
    issue_scores_of(y, 1, ring.stage);
  }
  __device__ __forceinline__ void issue_scores_of(float (&scores)[32], int operand, int stage) {
    const std::uint64_t b = wgmma::along_rows(shared.streamed(operand, stage));
    const std::uint64_t resident = wgmma::along_rows(shared.resident(operand, group));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint64_t at = (step / 4 * kBox + step % 4 * 32) >> 4;
      if constexpr (kHeld) {
        if (step == 0)
          wgmma::multiply<false, false>(scores, held[operand][step], b + at);
        else
          wgmma::multiply<true, false>(scores, held[operand][step], b + at);
      } else {
        if (step == 0)
          wgmma::multiply<false>(scores, resident + at, b + at);
        else
          wgmma::multiply<true>(scores, resident + at, b + at);
      }
    }
    wgmma::commit();
  }
  __device__ __forceinline__ void issue_sums(int stage) {
    const std::uint64_t s1 = wgmma::across_rows(shared.streamed(0, stage), kBox);
    const std::uint64_t s2 = wgmma::across_rows(shared.streamed(1, stage), kBox);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
      const std::uint64_t at = (step * wgmma::kDepth * 128) >> 4;
      if constexpr (kKeys) wgmma::multiply<true, true>(second, p[step], s2 + at);
      wgmma::multiply<true, true>(first, ds[step], s1 + at);
    }
    wgmma::commit();
  }

  __device__ __forceinline__ void load_row_statistics() {
    if constexpr (!kKeys) {
      const float* from =
          a.statistics +
          ((std::int64_t{item.batch} * a.heads + item.head) * a.tiles + min(mine, a.tiles - 1)) * 2 * kTile;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_logsumexp[half] = from[row() + 8 * half];
        row_delta[half] = from[kTile + row() + 8 * half];
      }
    }
  }
  __device__ static int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
  __device__ static int column() { return threadIdx.x % 4 * 2; }

  /// x: scores to probabilities.
  __device__ __forceinline__ void make_probabilities(int current, int stage) {
    const float factor = a.scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      float2 shift;
      if constexpr (kKeys) shift = load_pair(shared.statistics(stage) + (8 * j + column()) * sizeof(float));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float s = kKeys ? (i % 2 == 0 ? shift.x : shift.y) : row_logsumexp[i / 2];
        x[4 * j + i] = exp2_approximately(fmaf(x[4 * j + i], factor, s));
      }
    }
    if (a.causal ? current == mine : !kKeys && current == a.tiles - 1) mask(current);
  }
  __device__ __forceinline__ void mask(int current) {
    const int inside = a.sequence - current * kTile;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row() + i / 2 * 8, c = 8 * j + column() + i % 2;
        const bool attended = kKeys ? c >= r : c < (a.causal ? r + 1 : inside);
        if (!attended) x[4 * j + i] = 0;
      }
  }
  /// y: gradients of probabilities to those of scores, without the scale.
  __device__ __forceinline__ void make_score_gradients(int stage) {
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      float2 delta;
      if constexpr (kKeys) delta = load_pair(shared.statistics(stage) + (kTile + 8 * j + column()) * sizeof(float));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float d = kKeys ? (i % 2 == 0 ? delta.x : delta.y) : row_delta[i / 2];
        y[4 * j + i] = x[4 * j + i] * (y[4 * j + i] - d);
      }
    }
  }

  __device__ __forceinline__ void store() {
    const std::int64_t pitch = std::int64_t{a.heads + 2 * a.kv_heads} * kHead;
    const int rows = a.sequence - mine * kTile;
    bf16* to = a.dqkv + (std::int64_t{item.batch} * a.sequence + mine * kTile) * pitch + item.head * kHead;
    if constexpr (kKeys) {
      to += a.heads * kHead;
      store_rows<kHead>(to + a.kv_heads * kHead, pitch, rows, second, 1.0f);
    }
    store_rows<kHead>(to, pitch, rows, first, a.scale);
  }

  const GradArguments& a;
  const Shared<kHead>& shared;
  const Item item;
  const int group, mine;  ///< mine: the tile that this part's rows are
  int tile = 0, left = 0;
  std::uint32_t held[2][kHeld ? kSteps : 1][4];
  float x[32], y[32];
  float first[kHead / 2], second[kKeys ? kHead / 2 : 1];  ///< dk and dv, or dq
  std::uint32_t p[kTileSteps][4], ds[kTileSteps][4];
  float row_logsumexp[2], row_delta[2];
};

/// Waits for the next item.
template <int kHead>
__device__ __forceinline__ int receive(const Shared<kHead>& shared, std::uint32_t parity) {
  tma::wait(shared.resident_full(), parity);
  int index;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(index) : "r"(shared.item()) : "memory");
  return __shfl_sync(~0u, index, 0);  // the compiler sees: the same in a whole warp
}

template <int kHead>
__device__ __forceinline__ void consume(const GradArguments& a, const Shared<kHead>& shared) {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  Ring<Layout<kHead>::kStages> ring;
  std::uint32_t parity = 0;
  int index = receive(shared, parity);
  for (; index < a.key_items; index = receive(shared, parity ^= 1))
    Part<kHead, true>(a, shared, Item(a, index, true), group).run(ring);
  for (; index < a.items; index = receive(shared, parity ^= 1))
    Part<kHead, false>(a, shared, Item(a, index, false), group).run(ring);
}

template <int kHead>
__global__ void __launch_bounds__(kThreads, 1) attention_grad_kernel(const __grid_constant__ GradArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = Layout<kHead>;
  extern __shared__ unsigned char memory[];
  const Shared<kHead> shared{(tma::shared_address(memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * kGroups;
    for (int stage = 0; stage < L::kStages; ++stage) {
      tma::init(shared.full(stage), 1);
      tma::init(shared.empty(stage), kWarps);
    }
    tma::init(shared.resident_full(), 1);
    tma::init(shared.resident_empty(), kWarps);
    tma::fence_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) produce<kHead>(a, shared);
  } else {
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
  return kCounterBytes + static_cast<std::size_t>(s.batch * s.heads * tiles_of(s)) * 2 * kTile * sizeof(float);
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
  const int tiles = tiles_of(s), blocks = (tiles + kGroups - 1) / kGroups;
  auto* next = static_cast<int*>(o.workspace);
  auto* statistics = reinterpret_cast<float*>(static_cast<char*>(o.workspace) + kCounterBytes);
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
    attention_grad_kernel<kHead><<<grid, kThreads, Layout<kHead>::kBytes, stream>>>(arguments);
    QUERN_CUDA(cudaGetLastError());
  });
}

}  // namespace quern::cuda
