#pragma once
// Sums of products (product_wgmma.cuh) of 8-bit floats with scales of 128 x 128 elements of the second operand, and of
// the first likewise or, where a Finish works behind stages, of 128 elements of a row (quern/block_scales.h); a stage
// is a block. As in product_rescaling.cuh sums stay in the tensor cores, in units of the scales of the block that was
// multiplied last. Scales are powers of two, and neighbouring squares often have the same: where the ratios of all of a
// tile's are one, products follow each other as if there were one scale (but not where a Finish works behind stages).
//
// Warps beside the one that loads write a stage's factors into shared memory: ratios, and behind them the scales
// themselves, which bring finished sums to the units of results.

#include "products/own/product_factors.cuh"
#include "products/own/product_turning.cuh"

namespace quern::cuda::product {

/// Of the second operand, by a column of a tile.
template <int kColumns>
__device__ __forceinline__ int square_of_column(const Operands& o, const Item& item, int column) {
  constexpr int kHalf = kColumns / 2;
  const int half = column / kHalf;
  return square_of(o.scale_b, item.column * o.b_step[half] + o.b_first[half] + column % kHalf);
}

/// Of each 32 columns of a tile, where both operands have squares. A thread of the warp that writes them has the scales
/// of 32 columns.
template <int kColumns>
struct SquareFactors {
  static constexpr int kWriters = 1, kCount = kColumns / 32, kAhead = 3;
  static constexpr std::uint32_t kBytes = 4 * 8;
  float at[8];

  static __device__ __forceinline__ SquareFactors read(std::uint32_t from) {
    const float4 low = read_factors(from), high = read_factors(from + 16);
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
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

  struct Scales {
    float a, b;
    __device__ __forceinline__ Scales over(const Scales& next) const {
      return {__fdividef(a, next.a), __fdividef(b, next.b)};
    }
    __device__ __forceinline__ void write(std::uint32_t to, const Scales& ratio, int thread) const {
      if (thread >= 8) return;
      put(to + 4 * thread, ratio.a * ratio.b);
      put(to + kBytes + 4 * thread, a * b);
    }
  };
  struct Source {
    int a, b;  ///< places
    __device__ __forceinline__ Source(const Operands& o, const Item& item, int thread)
        : a(square_of(o.scale_a, item.row(0))),
          b(square_of_column<kColumns>(o, item, min(32 * thread, kColumns - 32))) {}
    __device__ __forceinline__ Scales at(const Operands& o, int block) const {
      return {*of_block(o.scale_a, a, block), *of_block(o.scale_b, b, block)};
    }
  };
};

/// Of this thread's two rows, which are neighbours, and each 128 columns of a tile, where the first operand has scales
/// of rows. A thread of the warps that write them has the scales of two rows.
template <int kColumns>
struct LineFactors {
  static_assert(kColumns % kScaleBlock == 0);
  static constexpr int kWriters = kRows / 2 / 32, kCount = kColumns / static_cast<int>(kScaleBlock);
  static constexpr int kAhead = 2;  ///< what registers there are for
  static constexpr std::uint32_t kOfRows = 4 * kRows, kBytes = kCount * kOfRows;
  float2 at[kCount];

  static __device__ __forceinline__ LineFactors read(std::uint32_t from) {
    const int row =
        static_cast<int>(threadIdx.x) / 128 * kHalfRows + warp_row() + static_cast<int>(threadIdx.x) % 32 / 4 * 2;
    LineFactors f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) f.at[i] = read_pair(from + i * kOfRows + 4 * row);
    return f;
  }
  __device__ __forceinline__ bool all_one() const { return false; }  // of so many never
  __device__ __forceinline__ void scale(float (&sums)[kColumns / 2]) const {
    wgmma::pin(sums);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sums[i] *= i / 2 % 2 == 0 ? at[i / 64].x : at[i / 64].y;
  }

  struct Scales {
    float2 a;
    float b[kCount];
    __device__ __forceinline__ Scales over(const Scales& next) const {
      Scales ratio{{__fdividef(a.x, next.a.x), __fdividef(a.y, next.a.y)}, {}};
#pragma unroll
      for (int i = 0; i < kCount; ++i) ratio.b[i] = __fdividef(b[i], next.b[i]);
      return ratio;
    }
    __device__ __forceinline__ void write(std::uint32_t to, const Scales& ratio, int thread) const {
      ratio.put_at(to + 8 * thread);
      put_at(to + kBytes + 8 * thread);
    }
    __device__ __forceinline__ void put_at(std::uint32_t to) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) put(to + i * kOfRows, make_float2(a.x * b[i], a.y * b[i]));
    }
  };
  struct Source {
    int a, b[kCount];  ///< places
    /// An even number of rows.
    __device__ __forceinline__ Source(const Operands& o, const Item& item, int thread)
        : a(min(item.row(0) + 2 * thread, o.scale_a.count - 2)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) b[i] = square_of_column<kColumns>(o, item, i * static_cast<int>(kScaleBlock));
    }
    __device__ __forceinline__ Scales at(const Operands& o, int block) const {
      Scales scales{*reinterpret_cast<const float2*>(of_block(o.scale_a, a, block)), {}};
#pragma unroll
      for (int i = 0; i < kCount; ++i) scales.b[i] = *of_block(o.scale_b, b[i], block);
      return scales;
    }
  };
};

template <class Formats, class Factors, Rows kRowsLie, Columns kColumnsLie, class Memory>
class Factored {
 public:
  static constexpr int kSums = Memory::kColumns / 2;

  __device__ Factored(const Operands&, const Memory& shared, int number)
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

template <class OfFormats, template <int> class OfFactors, Rows kOfRows, Columns kOfColumns>
struct FactoredSums {
  using Formats = OfFormats;
  static_assert(Formats::kDepth == kScaleBlock, "a stage is a block");
  static constexpr Rows kRowsLie = kOfRows;
  static constexpr Columns kColumnsLie = kOfColumns;
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

/// Both operands have squares.
template <class Formats, Rows kRowsLie, Columns kColumnsLie = Columns::along>
using SquaresSums = FactoredSums<Formats, SquareFactors, kRowsLie, kColumnsLie>;
/// The first has scales of rows.
template <class Formats>
using LinesSums = FactoredSums<Formats, LineFactors, Rows::paired, Columns::dealt>;

}  // namespace quern::cuda::product
