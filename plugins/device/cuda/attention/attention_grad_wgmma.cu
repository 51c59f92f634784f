// The gradient of attention on Hopper's tensor cores, without scores in memory. Blocks stay and take work items, first
// all of one kind and then all of the other:
//   keys      dk and dv of 128 keys of a key-value head: K and V stay, (Q, dy) tiles of all its query heads stream by
//   queries   dq of 128 queries of a head: Q and dy stay, (K, V) tiles stream by
// Both make a tile of scores X = R1 S1^T and of P's gradient Y = R2 S2^T, rows being what stays, then P and dS = P (Y -
// delta) in registers, and add P S2 and dS S1 to their results. That is 7 GEMMs where keeping the sums of dq in
// memory would take 5, but every sum has one owner and one order: bits depend on nothing but a sequence's own operands.
// Of documents and windows, only tiles stream by that have a pair to attend to (attention_ranges.h).
// A warpgroup owns 64 rows. Tiles come by TMA into a ring of stages; a producer warp also draws the items. The wgmmas
// of the next tile's X and Y are issued before those that use this tile's P and dS, so that the tensor cores have work
// while exponentials are taken. Dao et al., "FlashAttention-2" (2023) and Shah et al., "FlashAttention-3" (2024).

#include <algorithm>

#include "attention/attention.h"
#include "attention/attention_grad_part.cuh"
#include "attention/attention_ranges.h"
#include "primitives/tensor_map.h"
#include "primitives/vector.cuh"
#include "runtime/check.h"

namespace quern::cuda {

using namespace attention_grad;

namespace {

constexpr std::size_t kCounterBytes = 256;

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

template <int kHead>
__device__ void load_tile(const Shared<kHead>& shared, const CUtensorMap& map, std::uint32_t to, int column, int row,
                          int batch, std::uint32_t barrier) {
#pragma unroll
  for (int box = 0; box < Layout<kHead>::kBoxes; ++box)
    tma::load_box(to + box * kBox, map, column + box * wgmma::kColumns, row, batch, barrier);
}

/// One thread: draws items and keeps the tiles coming.
template <int kHead, bool kRanges>
__device__ void produce(const GradArguments& a, const Shared<kHead>& shared) {
  using L = Layout<kHead>;
  tma::Ring<L::kStages> ring;
  for (tma::Ring<L::kResidents> residents;; residents.advance()) {
    const int index = atomicAdd(a.next, 1), place = residents.stage;
    const std::uint32_t resident_full = shared.resident_full(place);
    tma::wait(shared.resident_empty(place), residents.parity ^ 1);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.item(place)), "r"(index) : "memory");
    if (index >= a.items) {
      tma::arrive(resident_full);
      return;
    }
    const Item<kRanges> item(a, index, index < a.key_items);
    const int kv_head = item.keys ? item.head : item.head / a.group;
    const int key = (a.heads + kv_head) * kHead, value = key + a.kv_heads * kHead;
    tma::arrive_expecting(resident_full, 2 * kGroups * L::kTileBytes);
    for (int group = 0; group < kGroups; ++group) {
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

/// Waits for the next item.
template <int kHead>
__device__ __forceinline__ int receive(const Shared<kHead>& shared,
                                       const tma::Ring<Layout<kHead>::kResidents>& residents) {
  tma::wait(shared.resident_full(residents.stage), residents.parity);
  int index;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(index) : "r"(shared.item(residents.stage)) : "memory");
  return __shfl_sync(~0u, index, 0);  // the compiler sees: the same in a whole warp
}

template <int kHead, bool kRanges>
__device__ __forceinline__ void consume(const GradArguments& a, const Shared<kHead>& shared) {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  tma::Ring<Layout<kHead>::kStages> ring;
  tma::Ring<Layout<kHead>::kResidents> residents;
  auto next = [&] {
    residents.advance();
    return receive(shared, residents);
  };
  int index = receive(shared, residents);
  for (; index < a.key_items; index = next())
    Part<kHead, true, kRanges>(a, shared, {a, index, true}, residents.stage, group).run(ring);
  for (; index < a.items; index = next())
    Part<kHead, false, kRanges>(a, shared, {a, index, false}, residents.stage, group).run(ring);
}

template <int kHead, bool kRanges>
__global__ void __launch_bounds__(kThreads, 1) attention_grad_kernel(const __grid_constant__ GradArguments a) {
  using L = Layout<kHead>;
  extern __shared__ unsigned char memory[];
  const Shared<kHead> shared{(tma::shared_address(memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    constexpr int kArrivals = 4 * kGroups * tma::kWarpArrivals;
    for (int stage = 0; stage < L::kStages; ++stage) {
      tma::init(shared.full(stage), 1);
      tma::init(shared.empty(stage), kArrivals);
    }
    for (int place = 0; place < L::kResidents; ++place) {
      tma::init(shared.resident_full(place), 1);
      tma::init(shared.resident_empty(place), kArrivals);
    }
    tma::fence_init();
  }
  __syncthreads();
  // Of the 168 registers that each thread starts with, the producer's go to those who multiply.
  if (threadIdx.x < 128) {
    wgmma::give_registers<24>();
    if (threadIdx.x == 0) produce<kHead, kRanges>(a, shared);
  } else {
    wgmma::take_registers<240>();
    consume<kHead, kRanges>(a, shared);
  }
}

/// Calls f.operator()<head, ranges>() for the shape.
template <class F>
void with_kernel(const AttentionShape& s, F&& f) {
  auto with_head = [&]<bool kRanges>() {
    s.head_dim == 64 ? f.template operator()<64, kRanges>() : f.template operator()<128, kRanges>();
  };
  has_ranges(s) ? with_head.template operator()<true>() : with_head.template operator()<false>();
}

int tiles_of(const AttentionShape& s) { return static_cast<int>((s.sequence + kTile - 1) / kTile); }

/// Workspace: the counter, statistics, and of shapes with ranges these, of keys and of queries.
std::size_t statistics_end(const AttentionShape& s) {
  return kCounterBytes + static_cast<std::size_t>(s.batch * s.heads * tiles_of(s)) * kTile * sizeof(float2);
}

}  // namespace

std::size_t wgmma_attention_grad_workspace(const AttentionShape& s) {
  return statistics_end(s) + (has_ranges(s) ? 2 * attention_range_bytes(s) : 0);
}

void load_wgmma_attention_grad(const AttentionShape& s) {
  find_tensor_map_encoder();
  if (has_ranges(s)) load_attention_ranges();
  with_kernel(s, [&]<int kHead, bool kRanges>() {
    cudaFuncAttributes attributes;
    QUERN_CUDA(cudaFuncGetAttributes(&attributes, statistics_kernel<kHead>));  // loads the code
    QUERN_CUDA(cudaFuncSetAttribute(attention_grad_kernel<kHead, kRanges>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(Layout<kHead>::kBytes)));
  });
}

void wgmma_attention_grad(const AttentionShape& s, const AttentionOperands& o, int multiprocessors,
                          cudaStream_t stream) {
  if (s.tokens() == 0) return;
  const int tiles = tiles_of(s);
  auto* next = static_cast<int*>(o.workspace);
  auto* statistics = reinterpret_cast<float2*>(static_cast<char*>(o.workspace) + kCounterBytes);
  AttentionRanges ranges;
  if (has_ranges(s)) {
    ranges.keys = reinterpret_cast<int2*>(static_cast<char*>(o.workspace) + statistics_end(s));
    ranges.queries = ranges.keys + attention_range_bytes(s) / sizeof(int2);
    write_attention_ranges(s, o.documents, ranges, stream);
  }
  with_kernel(s, [&]<int kHead, bool kRanges>() {
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
    const int blocks = (tiles + kGroups - 1) / kGroups;
    const int key_items = static_cast<int>(s.batch * s.kv_heads) * blocks;
    const GradArguments arguments{
        .qkv = tensor_map(DType::bf16, {s.packed(), s.sequence, s.batch}, o.qkv, {wgmma::kColumns, kTile, 1}),
        .dy = tensor_map(DType::bf16, {s.width(), s.sequence, s.batch}, o.dy, {wgmma::kColumns, kTile, 1}),
        .statistics = statistics,
        .keys = ranges.keys,
        .queries = ranges.queries,
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
    attention_grad_kernel<kHead, kRanges><<<grid, kThreads, Layout<kHead>::kBytes, stream>>>(arguments);
    QUERN_CUDA(cudaGetLastError());
  });
}

}  // namespace quern::cuda
