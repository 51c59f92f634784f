// Attention on Hopper's tensor cores, for queries that attend to a range of keys: documents and windows. Tiles of keys
// outside of a block's ranges are neither read nor multiplied. Blocks stay and take work items, 128 queries of a head
// each: the queries stay in registers, and tiles of 128 keys and values stream by, by TMA into rings of stages; a
// producer warp also draws the items. A warpgroup owns 64 rows, so the sums of a row have one order, which depends on
// its own sequence alone. The scores of the next tile are multiplied beside the values of this one, a matmul that is
// waited for after the next exponentials. Dao et al., "FlashAttention-2" (2023) and Shah et al., "FlashAttention-3"
// (2024).

#include <algorithm>

#include "attention/attention.h"
#include "attention/attention_ranges.h"
#include "attention/attention_tiles.cuh"
#include "primitives/tensor_map.h"
#include "runtime/check.h"

namespace quern::cuda {

using namespace attention_tiles;

namespace {

constexpr int kRows = kGroups * kTile;       ///< of a block: its queries, and of a tile of keys or values
constexpr std::uint32_t kBox = kRows * 128;  ///< bytes of a box, 64 columns
constexpr float kLn2 = 0.69314718055994530942f;
constexpr std::size_t kCounterBytes = 256;

struct Arguments {
  CUtensorMap qkv;   ///< (B, S, columns) in boxes of 128 x 64
  const int2* keys;  ///< ranges, (B, S)
  bf16* y;           ///< (B, S, heads, kHead)
  float* logsumexp;  ///< (B, heads, S), or null
  int* next;         ///< the next item
  int sequence, blocks, heads, kv_heads, items;
  float scale;
};

/// Shared memory, in bytes from an address that is a multiple of 1024.
template <int kHead>
struct Layout {
  static constexpr int kBoxes = kHead / wgmma::kColumns;
  static constexpr int kStages = kHead == 64 ? 4 : 2;  ///< of keys, and of values
  static constexpr int kResidents = 2;                 ///< items whose queries there is room for
  static constexpr std::uint32_t kTileBytes = kBoxes * kBox;
  static constexpr std::uint32_t kStage = kResidents * kTileBytes;  ///< (keys and values, stages, tile)
  static constexpr std::uint32_t kBarriers = kStage + 2 * kStages * kTileBytes;
  static constexpr std::uint32_t kItem = kBarriers + 16 * (2 * kStages + kResidents);
  static constexpr std::uint32_t kBytes = kItem + 4 * kResidents + 1024;  ///< 1024: what alignment may take
};

/// Addresses of what Layout lays out. `of`: 0 for keys, 1 for values.
template <int kHead>
struct Shared {
  using L = Layout<kHead>;
  std::uint32_t base;
  __device__ std::uint32_t queries(int place) const { return base + place * L::kTileBytes; }
  __device__ std::uint32_t tile(int of, int stage) const {
    return base + L::kStage + (of * L::kStages + stage) * L::kTileBytes;
  }
  __device__ std::uint32_t full(int of, int stage) const {
    return base + L::kBarriers + 16 * (of * L::kStages + stage);
  }
  __device__ std::uint32_t empty(int of, int stage) const { return full(of, stage) + 8; }
  __device__ std::uint32_t queries_full(int place) const { return full(2, place); }
  __device__ std::uint32_t queries_empty(int place) const { return queries_full(place) + 8; }
  __device__ std::uint32_t item(int place) const { return base + L::kItem + 4 * place; }
};

/// A piece of work: the queries of a block, and the tiles that some of them attend to.
struct Item {
  __device__ __forceinline__ Item(const Arguments& a, int index) {
    // Under a causal mask the last blocks attend to most: they come first.
    begin = (a.blocks - 1 - index % a.blocks) * kRows;
    head = index / a.blocks % a.heads;
    batch = index / a.blocks / a.heads;
    span = Span<kRows>::of(ranges(a), begin, kRows, a.sequence);
  }
  __device__ const int2* ranges(const Arguments& a) const { return a.keys + std::int64_t{batch} * a.sequence; }
  int begin, head, batch;
  Span<kRows> span;
};

/// One thread: draws items and keeps the tiles coming.
template <int kHead>
__device__ void produce(const Arguments& a, const Shared<kHead>& shared) {
  using L = Layout<kHead>;
  tma::Ring<L::kStages> ring;
  for (tma::Ring<L::kResidents> residents;; residents.advance()) {
    const int index = atomicAdd(a.next, 1), place = residents.stage;
    const std::uint32_t queries_full = shared.queries_full(place);
    tma::wait(shared.queries_empty(place), residents.parity ^ 1);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.item(place)), "r"(index) : "memory");
    if (index >= a.items) {
      tma::arrive(queries_full);
      return;
    }
    const Item item(a, index);
    auto load = [&](std::uint32_t to, int column, int row, std::uint32_t barrier) {
      tma::arrive_expecting(barrier, L::kTileBytes);
#pragma unroll
      for (int box = 0; box < L::kBoxes; ++box)
        tma::load_box(to + box * kBox, a.qkv, column + box * wgmma::kColumns, row, item.batch, barrier);
    };
    load(shared.queries(place), item.head * kHead, item.begin, queries_full);
    const int key = (a.heads + item.head / (a.heads / a.kv_heads)) * kHead, value = key + a.kv_heads * kHead;
    for (int tile = item.span.first; tile < item.span.end; ++tile, ring.advance()) {
#pragma unroll
      for (int of = 0; of < 2; ++of) {
        tma::wait(shared.empty(of, ring.stage), ring.parity ^ 1);
        load(shared.tile(of, ring.stage), of == 0 ? key : value, tile * kRows, shared.full(of, ring.stage));
      }
    }
  }
}

/// A warpgroup's part of an item: the results of its 64 rows.
template <int kHead>
class Part {
  using L = Layout<kHead>;
  static constexpr int kSteps = kHead / wgmma::kDepth, kTileSteps = kRows / wgmma::kDepth;

 public:
  __device__ __forceinline__ Part(const Arguments& arguments, const Shared<kHead>& shared, const Item& item, int group)
      : a(arguments),
        shared(shared),
        item(item),
        begin(item.begin + group * kTile),
        span(Span<kRows>::of(item.ranges(arguments), begin, kTile, arguments.sequence)) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      range[half] = __ldg(item.ranges(a) + min(begin + row() + 8 * half, a.sequence - 1));
    if (begin >= a.sequence) span = item.span;  // rows that are not there
  }

  __device__ __forceinline__ void run(tma::Ring<L::kStages>& ring, int place, int group) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma::load_a(held[step], shared.queries(place) + step / 4 * kBox + group * kTile * wgmma::kRowBytes, step % 4);
    release<ReadBy::threads>(shared.queries_empty(place));
#pragma unroll
    for (int i = 0; i < kHead / 2; ++i) sums[i] = 0;
    pass(ring, span.first - item.span.first);
    wait_for(0, ring);
    wgmma::fence();
    issue_scores(ring.stage);
    wgmma::wait<0>();
    wgmma::pin(scores);
    release<ReadBy::products>(shared.empty(0, ring.stage));
    make_probabilities(span.first);
    round();
    for (int tile = span.first + 1; tile < span.end; ++tile) {
      const tma::Ring<L::kStages> values = ring;
      ring.advance();
      wait_for(0, ring);
      wgmma::pin(sums);
      wgmma::fence();
      issue_scores(ring.stage);
      wait_for(1, values);
      issue_sums(values.stage);
      wgmma::wait<1>();
      wgmma::pin(scores);
      release<ReadBy::products>(shared.empty(0, ring.stage));
      const float2 factors = make_probabilities(tile);
      wgmma::wait<0>();
      wgmma::pin(sums);
      release<ReadBy::products>(shared.empty(1, values.stage));
#pragma unroll
      for (int i = 0; i < kHead / 2; ++i) sums[i] *= i / 2 % 2 == 0 ? factors.x : factors.y;
      round();
    }
    wait_for(1, ring);
    wgmma::pin(sums);
    wgmma::fence();
    issue_sums(ring.stage);
    wgmma::wait<0>();
    wgmma::pin(sums);
    release<ReadBy::products>(shared.empty(1, ring.stage));
    ring.advance();
    pass(ring, item.span.end - span.end);
    store();
  }

 private:
  __device__ __forceinline__ void wait_for(int of, const tma::Ring<L::kStages>& ring) const {
    tma::wait(shared.full(of, ring.stage), ring.parity);
  }
  /// Takes tiles that none of the rows attends to.
  __device__ void pass(tma::Ring<L::kStages>& ring, int tiles) const {
    for (; tiles > 0; --tiles, ring.advance())
#pragma unroll
      for (int of = 0; of < 2; ++of) {
        wait_for(of, ring);
        release<ReadBy::products>(shared.empty(of, ring.stage));  // without a read
      }
  }
  __device__ __forceinline__ void issue_scores(int stage) {
    const wgmma::Tile keys = wgmma::k_major_tile(shared.tile(0, stage));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint32_t at = step / 4 * kBox + step % 4 * wgmma::kDepthBytes;
      step == 0 ? wgmma::multiply<false, false>(scores, held[step], keys + at)
                : wgmma::multiply<true, false>(scores, held[step], keys + at);
    }
    wgmma::commit();
  }
  __device__ __forceinline__ void issue_sums(int stage) {
    const wgmma::Tile values = wgmma::mn_major_tile<kBox>(shared.tile(1, stage));
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step)
      wgmma::multiply<true, true>(sums, probabilities[step], values + step * wgmma::kMnMajorDepthBytes);
    wgmma::commit();
  }

  /// Scores to probabilities, up to a factor that is one over their sum; the factors of earlier sums.
  __device__ __forceinline__ float2 make_probabilities(int tile) {
    if (span.masked(tile)) mask(tile);
    float factors[2];
    const float scale = a.scale * kLog2e;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float larger = maximum[half];
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j)
        larger = fmaxf(larger, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 1));
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 2));
      const float shift = larger == -INFINITY ? 0 : larger * scale;
      factors[half] = exp2_approximately(fmaf(maximum[half], scale, -shift));
      maximum[half] = larger;
      float total = 0;
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
        for (int i = 4 * j + 2 * half; i < 4 * j + 2 * half + 2; ++i) {
          scores[i] = exp2_approximately(fmaf(scores[i], scale, -shift));
          total += scores[i];
        }
      totals[half] = totals[half] * factors[half] + total;
    }
    return {factors[0], factors[1]};
  }
  /// Has exponentials make zeros of masked pairs.
  __device__ __forceinline__ void mask(int tile) {
    const int first = tile * kRows + column();
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + 8 * j + i % 2;
        if (key < range[i / 2].x || key >= range[i / 2].y) scores[4 * j + i] = -INFINITY;
      }
  }
  __device__ __forceinline__ void round() {
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        probabilities[step][i] = wgmma::round_pair(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      totals[half] += __shfl_xor_sync(~0u, totals[half], 1);
      totals[half] += __shfl_xor_sync(~0u, totals[half], 2);
      const int place = begin + row() + 8 * half;
      if (a.logsumexp != nullptr && threadIdx.x % 4 == 0 && place < a.sequence)
        a.logsumexp[(std::int64_t{item.batch} * a.heads + item.head) * a.sequence + place] =
            maximum[half] * a.scale + __log2f(totals[half]) * kLn2;
    }
    const std::int64_t pitch = std::int64_t{a.heads} * kHead;
    bf16* to = a.y + (std::int64_t{item.batch} * a.sequence + begin) * pitch + item.head * kHead;
    store_rows<kHead>(to, pitch, a.sequence - begin, sums, {1.0f / totals[0], 1.0f / totals[1]});
  }

  const Arguments& a;
  const Shared<kHead>& shared;
  const Item& item;
  const int begin;   ///< the first of its rows
  Span<kRows> span;  ///< tiles that they attend to
  int2 range[2];     ///< of keys, by this thread's rows
  std::uint32_t held[kSteps][4];
  float scores[kRows / 2], sums[kHead / 2];
  std::uint32_t probabilities[kTileSteps][4];
  float maximum[2] = {-INFINITY, -INFINITY}, totals[2] = {0, 0};  ///< totals: of this thread's columns
};

template <int kHead>
__device__ __forceinline__ void consume(const Arguments& a, const Shared<kHead>& shared) {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  tma::Ring<Layout<kHead>::kStages> ring;
  for (tma::Ring<Layout<kHead>::kResidents> residents;; residents.advance()) {
    tma::wait(shared.queries_full(residents.stage), residents.parity);
    int index;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(index) : "r"(shared.item(residents.stage)) : "memory");
    index = __shfl_sync(~0u, index, 0);  // the compiler sees: the same in a whole warp
    if (index >= a.items) return;
    const Item item(a, index);
    Part<kHead>(a, shared, item, group).run(ring, residents.stage, group);
  }
}

template <int kHead>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ Arguments a) {
  using L = Layout<kHead>;
  extern __shared__ unsigned char memory[];
  const Shared<kHead> shared{(tma::shared_address(memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    constexpr int kArrivals = 4 * kGroups * tma::kWarpArrivals;
    for (int of = 0; of < 2; ++of)
      for (int stage = 0; stage < L::kStages; ++stage) {
        tma::init(shared.full(of, stage), 1);
        tma::init(shared.empty(of, stage), kArrivals);
      }
    for (int place = 0; place < L::kResidents; ++place) {
      tma::init(shared.queries_full(place), 1);
      tma::init(shared.queries_empty(place), kArrivals);
    }
    tma::fence_init();
  }
  __syncthreads();
  // Of the 168 registers that each thread starts with, the producer's go to those who multiply.
  if (threadIdx.x < 128) {
    wgmma::give_registers<24>();
    if (threadIdx.x == 0) produce<kHead>(a, shared);
  } else {
    wgmma::take_registers<240>();
    consume<kHead>(a, shared);
  }
}

template <class F>
void with_head(const AttentionShape& s, F&& f) {
  s.head_dim == 64 ? f.template operator()<64>() : f.template operator()<128>();
}

}  // namespace

std::size_t wgmma_attention_workspace(const AttentionShape& s) { return kCounterBytes + attention_range_bytes(s); }

void load_wgmma_attention(const AttentionShape& s) {
  find_tensor_map_encoder();
  load_attention_ranges();
  with_head(s, [&]<int kHead>() {
    QUERN_CUDA(cudaFuncSetAttribute(attention_kernel<kHead>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(Layout<kHead>::kBytes)));
  });
}

void wgmma_attention(const AttentionShape& s, const AttentionOperands& o, int multiprocessors, cudaStream_t stream) {
  if (s.tokens() == 0) return;
  auto* next = static_cast<int*>(o.workspace);
  auto* keys = reinterpret_cast<int2*>(static_cast<char*>(o.workspace) + kCounterBytes);
  write_attention_ranges(s, o.documents, {.keys = keys, .counter = next}, stream);
  with_head(s, [&]<int kHead>() {
    const int blocks = static_cast<int>((s.sequence + kRows - 1) / kRows);
    const Arguments arguments{
        .qkv = tensor_map(DType::bf16, {s.packed(), s.sequence, s.batch}, o.qkv, {wgmma::kColumns, kRows, 1}),
        .keys = keys,
        .y = static_cast<bf16*>(o.y),
        .logsumexp = o.logsumexp,
        .next = next,
        .sequence = static_cast<int>(s.sequence),
        .blocks = blocks,
        .heads = static_cast<int>(s.heads),
        .kv_heads = static_cast<int>(s.kv_heads),
        .items = static_cast<int>(s.batch * s.heads) * blocks,
        .scale = s.scale};
    const auto grid = static_cast<unsigned>(std::min(multiprocessors, arguments.items));
    attention_kernel<kHead><<<grid, kThreads, Layout<kHead>::kBytes, stream>>>(arguments);
    QUERN_CUDA(cudaGetLastError());
  });
}

}  // namespace quern::cuda
