#pragma once
// What one warpgroup does of a piece of work in attention's gradient on Hopper: it makes the gradients of its 64 rows
// from the tiles that stream by. attention_grad_wgmma.cu describes the whole.

#include <cstdint>

#include "attention/attention_grad_work.cuh"

namespace quern::cuda::attention_grad {

/// A warpgroup's part of an item: the gradients of its 64 rows.
template <int kHead, bool kKeys, bool kRanges>
class Part {
  using L = Layout<kHead>;
  static constexpr int kSteps = kHead / wgmma::kDepth, kTileSteps = kTile / wgmma::kDepth;
  /// Where registers suffice, what stays is held in them, and the scores of the next tile are made ahead.
  static constexpr bool kAhead = kHead == 64 || !kKeys;
  /// Of keys, statistics come with the tiles that stream by.
  static constexpr ReadBy kStreamed = kKeys ? ReadBy::threads : ReadBy::products;

 public:
  __device__ __forceinline__ Part(const GradArguments& arguments, const Shared<kHead>& shared,
                                  const Item<kRanges>& item, int place, int group)
      : a(arguments), shared(shared), item(item), place(place), group(group), mine(item.tile + group) {
    if constexpr (kRanges) {
      // All of the item's, also those that only the other warpgroup's rows attend to: to pass many tiles, while it
      // holds one that it has yet to use, would stop the ring.
      span = Span<kTile>::of(item.ranges(a), mine * kTile, kTile, a.sequence);
      own_first = item.first;
      own_end = item.end;
    } else {
      own_first = kKeys && a.causal ? max(item.first, mine) : item.first;
      own_end = !kKeys && a.causal ? min(item.end, mine + 1) : item.end;
    }
    if (mine < 0 || mine >= a.tiles) own_end = own_first;
    tile = own_first;
    left = (own_end - own_first) * item.heads;
  }

  __device__ __forceinline__ void run(tma::Ring<L::kStages>& ring) {
    if constexpr (kAhead) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        wgmma::load_a(held[0][step], shared.resident(place, 0, group) + step / 4 * kBox, step % 4);
        wgmma::load_a(held[1][step], shared.resident(place, 1, group) + step / 4 * kBox, step % 4);
      }
      release<ReadBy::threads>(shared.resident_empty(place));
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
    if constexpr (!kAhead) release<ReadBy::products>(shared.resident_empty(place));
    store();
  }

 private:
  /// Takes tiles that none of the rows attends to.
  __device__ void pass(tma::Ring<L::kStages>& ring, int tiles) {
    for (; tiles > 0; --tiles, ring.advance()) {
      tma::wait(shared.full(ring.stage), ring.parity);
      release<ReadBy::products>(shared.empty(ring.stage));  // without a read
    }
  }
  __device__ __forceinline__ void advance(tma::Ring<L::kStages>& ring) {
    --left;
    ring.advance();
    if (++tile != own_end) return;
    tile = own_first;
    pass(ring, item.end - own_end + (left > 0 ? own_first - item.first : 0));
  }
  /// Whether some of a tile's scores are not attended to.
  __device__ __forceinline__ bool masked(int current) const {
    if constexpr (kRanges)
      return span.masked(current);
    else
      return a.causal ? current == mine : !kKeys && current == a.tiles - 1;
  }

  /// Takes the tiles in turn. X and Y of the next are issued before the sums that use this one, so that two stages are
  /// held at most; a look ahead over a head's last tile passes the stages between within the ring.
  __device__ __forceinline__ void walk_ahead(tma::Ring<L::kStages>& ring) {
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
      make_probabilities<0, 4>(stage);  // in halves, which the compiler mixes better
      make_score_gradients<0, 4>(stage);
      wgmma::wait<0>();
      make_probabilities<4, 8>(stage);
      round<0, 2>();
      make_score_gradients<4, 8>(stage);
      round<2, 4>();
      if (previous >= 0) release<kStreamed>(shared.empty(previous));
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
  /// The same where registers do not suffice: one tile's X, then its Y while exponentials are taken, then its sums.
  __device__ __forceinline__ void walk(tma::Ring<L::kStages>& ring) {
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
      if (previous >= 0) release<kStreamed>(shared.empty(previous));
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
  /// Waits for the last sums.
  __device__ __forceinline__ void finish(int stage) {
    wgmma::wait<0>();
    wgmma::pin(first);
    if constexpr (kKeys) wgmma::pin(second);
    release<kStreamed>(shared.empty(stage));
  }

  /// X (kOperand 0) or Y (1) of the stage's tile.
  template <int kOperand>
  __device__ __forceinline__ void issue_scores(float (&scores)[32], int stage) {
    const wgmma::Tile b = wgmma::k_major_tile(shared.streamed(kOperand, stage));
    const wgmma::Tile resident = wgmma::k_major_tile(shared.resident(place, kOperand, group));
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
  /// Adds dS S1, and of keys P S2, of the stage's tile.
  __device__ __forceinline__ void issue_sums(int stage) {
    const wgmma::Tile s1 = wgmma::mn_major_tile<kBox>(shared.streamed(0, stage));
    const wgmma::Tile s2 = wgmma::mn_major_tile<kBox>(shared.streamed(1, stage));
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

  /// Has exponentials make zeros of masked pairs.
  __device__ __forceinline__ void mask(int current) {
    const int inside = a.sequence - current * kTile;
    int2 ranges[2];
    if constexpr (kRanges) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int2 range = __ldg(item.ranges(a) + min(mine * kTile + row() + 8 * half, a.sequence - 1));
        ranges[half] = make_int2(range.x - current * kTile, range.y - current * kTile);
      }
    }
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row() + i / 2 * 8, c = 8 * j + column() + i % 2;
        const bool attended = kRanges ? c >= ranges[i / 2].x && c < ranges[i / 2].y
                              : kKeys ? c >= r
                                      : c < (a.causal ? r + 1 : inside);
        if (!attended) x[4 * j + i] = -INFINITY;
      }
  }
  /// Scores x to probabilities, in columns [8 kFrom, 8 kTo).
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
  /// Gradients y of probabilities to the scores' gradients, without the scale; likewise.
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
      store_rows<kHead>(to + a.kv_heads * kHead, pitch, rows, second, {1.0f, 1.0f});
    }
    store_rows<kHead>(to, pitch, rows, first, {a.scale, a.scale});
  }

  const GradArguments& a;
  const Shared<kHead>& shared;
  const Item<kRanges> item;
  const int place, group, mine;  ///< place: of the operands that stay; mine: the tile that this part's rows are
  int own_first, own_end;        ///< tiles that these rows take, of each head
  Span<kTile> span;              ///< which of them are not masked; of kernels with ranges
  int tile, left;                ///< the next one, and how many there are in all heads
  std::uint32_t held[2][kAhead ? kSteps : 1][4];
  float x[32], y[32];
  float first[kHead / 2], second[kKeys ? kHead / 2 : 1];  ///< dk and dv, or dq
  std::uint32_t p[kTileSteps][4], ds[kTileSteps][4];
  float2 row_statistics[2];
};

}  // namespace quern::cuda::attention_grad
