#pragma once
// Sums of products (product_wgmma.cuh) of 8-bit floats with scales of 128 x 128 elements of both operands
// (quern/block_scales.h); a stage is a block. As in product_rescaling.cuh sums stay in the tensor cores, in units of
// the scales of the block that was multiplied last. Scales are powers of two, and neighbours often have the same: where
// the ratios of all of a tile's are one, products follow each other as if there were one scale (but not where a Finish
// works behind stages).
//
// A warp beside the one that loads writes a stage's ratios into shared memory, and the scales themselves, which bring
// finished sums to the units of results.

#include "products/own/product_turning.cuh"
#include "quern/block_scales.h"

namespace quern::cuda::product {

/// Of each 32 columns of a tile.
template <int kColumns>
struct SquareFactors {
  static constexpr int kCount = kColumns / 32;
  static constexpr std::uint32_t kBytes = 4 * 8;
  float at[8];

  static __device__ __forceinline__ SquareFactors read(std::uint32_t from) {
    SquareFactors f;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(f.at[4 * i]), "=f"(f.at[4 * i + 1]), "=f"(f.at[4 * i + 2]), "=f"(f.at[4 * i + 3])
                   : "r"(from + 16 * i)
                   : "memory");
    return f;
  }
  /// The same in all threads.
  __device__ __forceinline__ bool all_one() const {
    bool one = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) one = one && at[i] == 1.0f;
    return one;
  }
  __device__ __forceinline__ void scale(float (&sums)[kColumns / 2]) const {
    wgmma::pin(sums);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sums[i] *= at[i / 16];
  }
};

template <class Formats, Rows kRowsLie, Columns kColumnsLie, class Memory>
class Squares {
 public:
  static constexpr int kSums = Memory::kColumns / 2;

  __device__ Squares(const Operands&, const Memory& shared, int number)
      : shared_(shared), number_(number), stages_(shared), turned_(number) {}

  /// In runs of stages with equal scales.
  __device__ __forceinline__ void begin(const Item& item, float (&sums)[kSums]) {
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
  /// The stage that was expected. Waits for the one before even where no ratio differs: a branch between products that
  /// run makes the compiler wait for each.
  __device__ __forceinline__ void begin_stage(bool add, float (&sums)[kSums]) {
    if (add) {
      stages_.finish();
      if (!factors_.all_one()) factors_.scale(sums);
    }
    std::uint32_t words[kWords];
    multiply(stage_, words, add, sums);
  }
  __device__ __forceinline__ void finish(float (&sums)[kSums]) {
    const Factors factors = scales(stages_.running());
    stages_.finish();
    factors.scale(sums);
  }

 private:
  static constexpr int kWords = kRowsLie == Rows::across ? kTurnedWords : 1;
  using Factors = SquareFactors<Memory::kColumns>;
  __device__ __forceinline__ Factors ratios(int stage) const { return Factors::read(shared_.beside(stage)); }
  __device__ __forceinline__ Factors scales(int stage) const {
    return Factors::read(shared_.beside(stage) + Factors::kBytes);
  }

  __device__ __forceinline__ void multiply(int stage, std::uint32_t (&words)[kWords], bool add, float (&sums)[kSums]) {
    const wgmma::Tile b = wgmma::along_rows(shared_.b(stage));
    if constexpr (kRowsLie == Rows::across) {
      load_turned(words, turned_, shared_.a(stage));
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) Formats::multiply(sums, words + 4 * k, b + k * wgmma::kDepthBytes, add || k > 0);
      tma::fence_copies();  // threads read the first operand
    } else {
      const wgmma::Tile a = wgmma::along_rows(shared_.a(stage) + number_ * Memory::kA / kMultipliers);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        Formats::template multiply<kRowsLie, kColumnsLie>(sums, a + k * wgmma::kDepthBytes, b + k * wgmma::kDepthBytes,
                                                          add || k > 0);
    }
    stages_.begun(stage);
  }

  const Memory& shared_;
  const int number_;
  OverlappedStages<Memory> stages_;
  wgmma::TurnedA turned_;
  int stage_ = 0;
  Factors factors_ = {};
};

template <class OfFormats, Rows kOfRows, Columns kOfColumns = Columns::along>
struct SquaresSums {
  using Formats = OfFormats;
  static_assert(Formats::kDepth == kScaleBlock, "a stage is a block");
  static constexpr Rows kRowsLie = kOfRows;
  static constexpr Columns kColumnsLie = kOfColumns;
  template <class Memory>
  using On = Squares<Formats, kOfRows, kOfColumns, Memory>;

  static constexpr int kWriters = 1;
  static constexpr std::uint32_t beside(int) { return 2 * SquareFactors<256>::kBytes; }

  /// A thread writes those of 32 columns.
  template <class Memory>
  static __device__ __forceinline__ void write_beside(const Operands& o, const Memory& shared, int thread) {
    constexpr int kAhead = 3;  // blocks whose scales are on their way: a load takes about as long as a stage
    struct Pair {
      float a, b;
    };
    constexpr int kHalf = Memory::kColumns / 2;
    const int column = min(32 * thread, Memory::kColumns - 32), half = column / kHalf;
    tma::Ring<Memory::kStages> ring;
    for (Walk walk; walk.item < o.grid.items(); walk.item += walk.step) {
      const Item item = o.grid.at(walk.item);
      const float* a = first_of(o.scale_a, item.row(0));
      const float* b = first_of(o.scale_b, item.column * o.b_step[half] + o.b_first[half] + column % kHalf);
      auto load = [&](Pair& to, int block) {
        if (block < item.last) to = {a[std::int64_t{block} * o.scale_a.step], b[std::int64_t{block} * o.scale_b.step]};
      };
      Pair now{1, 1}, next[kAhead] = {};
      load(now, item.first);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load(next[i], item.first + 1 + i);
      float ratio = 1;  // of the first block nobody reads any
      for (int begin = item.first; begin < item.last; begin += kAhead) {
#pragma unroll
        for (int ahead = 0; ahead < kAhead; ++ahead) {
          const int block = begin + ahead;
          if (block >= item.last) break;
          const std::uint32_t to = shared.beside(ring.stage) + 4 * thread;
          tma::wait(shared.empty(ring.stage), ring.parity ^ 1);
          if (thread < 8) {
            put(to, ratio);
            put(to + SquareFactors<256>::kBytes, now.a * now.b);
          }
          tma::arrive_as_warp(shared.full(ring.stage));
          ring.advance();
          ratio = __fdividef(now.a, next[ahead].a) * __fdividef(now.b, next[ahead].b);
          now = next[ahead];
          load(next[ahead], block + 1 + kAhead);
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ const float* first_of(const BlockScales& scales, int row) {
    return scales.at + min(row, scales.count - 1) / static_cast<int>(kScaleBlock) * scales.square;
  }
  static __device__ __forceinline__ void put(std::uint32_t address, float factor) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(factor) : "memory");
  }
};

}  // namespace quern::cuda::product
