#pragma once
// The common part of GEMMs of 8-bit floats with block scales (quern/block_scales.h). A stage is a
// block. Warps beside the one that loads write factors made of scales into shared memory, beside a stage's operands.
//
// With Factored accumulators, of operands of which the second has scales of 128 x 128 elements, they are ratios, and
// behind them the scales themselves. As in gemm_rescaling.cuh accumulators stay in the tensor cores, in units of the
// scales of the block that was multiplied last; scales bring final accumulators to the units of results.

#include "products/own/gemm_transposing.cuh"
#include "quern/block_scales.h"

namespace quern::cuda::gemm {

__device__ __forceinline__ float read_factor(std::uint32_t from) {
  float f;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(f) : "r"(from) : "memory");
  return f;
}
__device__ __forceinline__ float4 read_factors(std::uint32_t from) {
  float4 f;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(f.x), "=f"(f.y), "=f"(f.z), "=f"(f.w)
               : "r"(from)
               : "memory");
  return f;
}
__device__ __forceinline__ float2 read_pair(std::uint32_t from) {
  float2 f;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(f.x), "=f"(f.y) : "r"(from) : "memory");
  return f;
}
__device__ __forceinline__ void put(std::uint32_t address, float factor) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(factor) : "memory");
}
__device__ __forceinline__ void put(std::uint32_t address, float2 factors) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(factors.x), "f"(factors.y) : "memory");
}

/// The place of the scales of a row, or of a column: its own, or of its 128. Past the end they are the last's: nothing
/// comes of them.
__device__ __forceinline__ int line_of(const BlockScales& scales, int at) { return min(at, scales.count - 1); }
__device__ __forceinline__ int square_of(const BlockScales& scales, int at) {
  return line_of(scales, at) / static_cast<int>(kScaleBlock) * scales.square;
}
/// 32 bits suffice: a matrix of 2^31 scales has 2^38 elements.
__device__ __forceinline__ const float& scale_at(const BlockScales& scales, int place, int block) {
  return scales.at[block * scales.step + place];
}
/// Of the second operand, by a column of a tile.
template <int kColumns>
__device__ __forceinline__ int square_of_column(const Operands& o, const WorkTile& item, int column) {
  constexpr int kHalf = kColumns / 2;
  const int half = column / kHalf;
  return square_of(o.scale_b, item.column * o.b_step[half] + o.b_first[half] + column % kHalf);
}

/// What warps beside the one that loads do: of each block along k they write its scales, or the ratios of the
/// scales of the block before to its own. A load takes about as long as a stage, so kAhead of them are on their way.
///
///   Factors
///     constexpr int kAhead;
///     struct Scales;                                  // that a thread has of a block
///       Scales over(const Scales& next);              // ratios
///       void write(to, const Scales& ratio, thread);  // beside a stage
///     struct Source;                                  // their place for an item: (operands, item, thread)
///       Scales at(block);
template <class Factors, class Memory>
__device__ __forceinline__ void write_factors(const Operands& o, const Memory& shared, int thread) {
  constexpr int kAhead = Factors::kAhead;
  using Scales = typename Factors::Scales;
  tma::Ring<Memory::kStages> ring;
  for (Walk walk; walk.item < o.grid.items(); walk.item += walk.step) {
    const WorkTile item = o.grid.at(walk.item);
    const typename Factors::Source source(o, item, thread);
    auto load = [&](Scales& to, int block) {
      if (block < item.last) to = source.at(block);
    };
    Scales now = {}, next[kAhead] = {}, ratio = {};  // no thread reads a ratio of the first block
    load(now, item.first);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(next[i], item.first + 1 + i);
    for (int begin = item.first; begin < item.last; begin += kAhead) {
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        const int block = begin + ahead;
        if (block >= item.last) break;
        const std::uint32_t to = shared.beside(ring.stage);
        tma::wait(shared.empty(ring.stage), ring.parity ^ 1);
        now.write(to, ratio, thread);
        tma::arrive_as_warp(shared.full(ring.stage));
        ring.advance();
        ratio = now.over(next[ahead]);
        now = next[ahead];
        load(next[ahead], block + 1 + kAhead);
      }
    }
  }
}

/// Factors, besides: of a tile of kColumns, constexpr kWriters, warps, and kBytes; read(from), as a thread uses them;
/// all_one(), the same in all threads; scale(sums).
template <class Formats, class Factors, Rows kLayoutA, Columns kLayoutB, class Memory>
class Factored {
 public:
  static constexpr int kAccumulators = Memory::kColumns / 2;

  __device__ Factored(const Operands&, const Memory& shared, int number)
      : shared_(shared), number_(number), stages_(shared), turned_(number) {}

  /// In runs of stages with equal scales.
  __device__ __forceinline__ void begin(const WorkTile& item, float (&sums)[kAccumulators]) {
    std::uint32_t even[kWords], odd[kWords];  // of which one is loaded while the other is multiplied
    int stage = stages_.next();
    for (int step = item.first;;) {
      Factors factors;
      do {
        multiply(stage, even, step > item.first, sums);
        if (++step == item.last) return;
        stage = stages_.next();
        factors = ratios(stage);
        if (!factors.all_one()) break;
        multiply(stage, odd, true, sums);
        if (++step == item.last) return;
        stage = stages_.next();
        factors = ratios(stage);
      } while (factors.all_one());
      stages_.finish();
      factors.scale(sums);
    }
  }
  __device__ __forceinline__ void expect_stage() {
    stage_ = stages_.next();
    factors_ = ratios(stage_);
  }
  /// The stage that was expected. Waits for the one before even where no ratio differs: a branch between wgmmas that
  /// run makes the compiler wait for each.
  __device__ __forceinline__ void begin_stage(bool add, float (&sums)[kAccumulators]) {
    if (add) {
      stages_.finish();
      if (!factors_.all_one()) factors_.scale(sums);
    }
    std::uint32_t words[kWords];
    multiply(stage_, words, add, sums);
  }
  __device__ __forceinline__ void finish(float (&sums)[kAccumulators]) {
    const Factors factors = scales(stages_.running());
    stages_.finish();
    factors.scale(sums);
  }

 private:
  static constexpr int kWords = kLayoutA == Rows::mn_major ? kTransposedWords : 1;
  __device__ __forceinline__ Factors ratios(int stage) const { return Factors::read(shared_.beside(stage)); }
  __device__ __forceinline__ Factors scales(int stage) const {
    return Factors::read(shared_.beside(stage) + Factors::kBytes);
  }

  __device__ __forceinline__ void multiply(int stage, std::uint32_t (&words)[kWords], bool add,
                                           float (&sums)[kAccumulators]) {
    const wgmma::Tile b = wgmma::k_major_tile(shared_.b(stage));
    if constexpr (kLayoutA == Rows::mn_major) {
      load_transposed(words, turned_, shared_.a(stage));
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) Formats::multiply(sums, words + 4 * k, b + k * wgmma::kDepthBytes, add || k > 0);
      tma::fence_copies();  // threads read the first operand
    } else {
      const wgmma::Tile a = wgmma::k_major_tile(shared_.a(stage) + number_ * Memory::kA / kConsumers);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        Formats::template multiply<kLayoutA, kLayoutB>(sums, a + k * wgmma::kDepthBytes, b + k * wgmma::kDepthBytes,
                                                       add || k > 0);
    }
    stages_.begun(stage);
  }

  const Memory& shared_;
  const int number_;
  OverlappedStages<Memory> stages_;
  wgmma::TransposedA turned_;
  int stage_ = 0;
  Factors factors_ = {};
};

template <class OfFormats, template <int> class OfFactors, Rows kOfRows, Columns kOfColumns>
struct FactoredMainloop {
  using Formats = OfFormats;
  static_assert(Formats::kDepth == kScaleBlock, "a stage is a block");
  static constexpr Rows kLayoutA = kOfRows;
  static constexpr Columns kLayoutB = kOfColumns;
  template <class Memory>
  using On = Factored<Formats, OfFactors<Memory::kColumns>, kOfRows, kOfColumns, Memory>;

  static constexpr int kWriters = OfFactors<256>::kWriters;
  static constexpr std::uint32_t beside(int columns) {
    return 2 * (columns > 128 ? OfFactors<256>::kBytes : OfFactors<128>::kBytes);
  }

  template <class Memory>
  static __device__ __forceinline__ void write_beside(const Operands& o, const Memory& shared, int thread) {
    write_factors<OfFactors<Memory::kColumns>>(o, shared, thread);
  }
};

}  // namespace quern::cuda::gemm
