#pragma once
// Sums of products (product_wgmma.cuh) of 8-bit floats with scales of blocks of 128 elements along the sums
// (quern/block_scales.h); a stage is a block. To add each block's sums to others in fp32 takes an FFMA of three
// registers, which holds up the other multiplier's products (docs/performance/cuda-fp8.md). Here sums stay in the
// tensor cores, in units of the scales of the block that was multiplied last, and before the next one they are
// multiplied by the ratio of these scales to its own. So they are fast ones, of about 14 bits. They overflow where the
// product of both scales falls by about 2^100 from any block to a later one. A block of zeros has scale 1, and where
// the others' are small, sums become small in its units: tensor cores keep them beside products of zeros (seen on
// H100s).
//
// Warps beside the one that loads write a stage's ratios into shared memory. Multipliers take turns: while one brings
// its sums to the next block's units, the other's products run.

#include "products/own/product_wgmma.cuh"
#include "quern/block_scales.h"

namespace quern::cuda::product {

/// Where scales lie: that of a row, or of a column, of block b is b steps on from its place. Rows and columns past the
/// end are taken as the last: nothing comes of them.
template <bool kSquares>
struct ScalesOfBlocks {
  const BlockScales &a, &b;
  __device__ __forceinline__ int row(int at) const { return min(at, a.count - 1); }
  __device__ __forceinline__ int column(int at) const {
    const int last = min(at, b.count - 1);
    return kSquares ? last / static_cast<int>(kScaleBlock) * b.square : last;
  }
};

/// Ratios of a stage in shared memory: of the tile's rows, then of each 32 columns, or of its columns as multipliers
/// read them: a thread's two columns of a group of 8, beside those of the next group.
template <bool kSquares>
struct RatiosOfStage {
  static constexpr std::uint32_t kColumns = 4 * kRows;  ///< where they begin
  static constexpr std::uint32_t bytes(int columns) {
    return kColumns + (4 * (kSquares ? columns / 32 : columns) + 15) / 16 * 16;
  }
  static __device__ __forceinline__ std::uint32_t place(int column) {
    if (kSquares) return 4 * column;
    return 4 * (column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2);
  }
  static __device__ __forceinline__ float at(std::uint32_t address) {
    float ratio;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(ratio) : "r"(address) : "memory");
    return ratio;
  }
  static __device__ __forceinline__ float4 of_groups(std::uint32_t columns, int pair) {
    float4 ratios;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(ratios.x), "=f"(ratios.y), "=f"(ratios.z), "=f"(ratios.w)
                 : "r"(columns + 64 * pair + threadIdx.x % 4 * 16)
                 : "memory");
    return ratios;
  }
  static __device__ __forceinline__ void put(std::uint32_t address, float ratio) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(ratio) : "memory");
  }
};

template <class Formats, bool kSquares, class Memory>
class Rescaling {
 public:
  static constexpr int kSums = Memory::kColumns / 2;

  __device__ Rescaling(const Operands& o, const Memory& shared, int number)
      : scales_{o.scale_a, o.scale_b}, shared_(shared), number_(number), stages_(shared) {
    if (number == 1) pass();
  }
  __device__ ~Rescaling() {
    if (number_ == 0) take_turn();  // the other's last pass
  }

  __device__ __forceinline__ void begin(const Item& item, float (&sums)[kSums]) {
    item_ = item;
    running_ = stages_.next();
    multiply(false, sums);
    for (int step = item.first + 1; step < item.last; ++step) {
      const int next = stages_.next();
      const std::uint32_t ratios = shared_.beside(next);
      const float of_rows[2] = {Ratios::at(ratios + 4 * row()), Ratios::at(ratios + 4 * (row() + 8))};
      const auto of_columns = ratios_of_columns(ratios + Ratios::kColumns);
      end_stage();
      scale(sums, of_rows, of_columns);
      running_ = next;
      multiply(true, sums);
    }
  }

  __device__ __forceinline__ void finish(float (&sums)[kSums]) {
    const BlockScales &a = scales_.a, &b = scales_.b;
    const int block = item_.last - 1, first = item_.column * Memory::kColumns;
    float of_rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) of_rows[i] = a.at[block * a.step + scales_.row(item_.row(0) + row() + 8 * i)];
    auto at = [&](int column) { return b.at[block * b.step + scales_.column(first + column)]; };
    if constexpr (kSquares) {
      OfSquares of_columns;
#pragma unroll
      for (int i = 0; i < kSums / 16; ++i) of_columns.at[i] = at(32 * i);
      end_stage();
      scale(sums, of_rows, of_columns);
    } else {
      end_stage();
      scale(sums, of_rows, [&](int pair) {
        const int column = 16 * pair + static_cast<int>(threadIdx.x) % 4 * 2;
        return make_float4(at(column), at(column + 1), at(column + 8), at(column + 9));
      });
    }
  }

 private:
  using Ratios = RatiosOfStage<kSquares>;

  /// Of the tile, the first row of this thread's sums.
  __device__ int row() const { return number_ * kHalfRows + warp_row() + static_cast<int>(threadIdx.x) % 32 / 4; }

  /// Factors of this thread's columns of two groups of 8.
  struct OfSquares {
    float at[kSums / 16];
    __device__ __forceinline__ float4 operator()(int pair) const {
      const float of = at[pair / 2];
      return {of, of, of, of};
    }
  };
  __device__ __forceinline__ auto ratios_of_columns(std::uint32_t from) const {
    if constexpr (kSquares) {
      OfSquares ratios;
#pragma unroll
      for (int i = 0; i < kSums / 16; ++i) ratios.at[i] = Ratios::at(from + 4 * i);
      return ratios;
    } else {
      return [from](int pair) { return Ratios::of_groups(from, pair); };
    }
  }

  template <class OfColumns>
  __device__ static __forceinline__ void scale(float (&sums)[kSums], const float (&of_rows)[2],
                                               const OfColumns& of_columns) {
    wgmma::pin(sums);
#pragma unroll
    for (int pair = 0; pair < kSums / 8; ++pair) {
      const float4 of = of_columns(pair);
      const float by[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[8 * pair + i] *= of_rows[i / 2 % 2] * by[i / 4 * 2 + i % 2];
    }
  }

  __device__ __forceinline__ void multiply(bool add, float (&sums)[kSums]) {
    const wgmma::Tile a = wgmma::along_rows(shared_.a(running_) + number_ * Memory::kA / kMultipliers);
    const wgmma::Tile b = wgmma::along_rows(shared_.b(running_));
    take_turn();
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      Formats::template multiply<Rows::along, Columns::along>(sums, a + k * wgmma::kDepthBytes,
                                                              b + k * wgmma::kDepthBytes, add || k > 0);
    wgmma::commit();
    pass();
  }
  __device__ __forceinline__ void end_stage() {
    wgmma::wait<0>();
    stages_.free(running_);
  }

  /// Barriers 1 and 2 are the turns of the two.
  __device__ __forceinline__ void take_turn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + number_), "n"(kMultiplying) : "memory");
  }
  __device__ __forceinline__ void pass() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 - number_), "n"(kMultiplying) : "memory");
  }

  const ScalesOfBlocks<kSquares> scales_;
  const Memory& shared_;
  const int number_;
  Stages<Memory> stages_;
  Item item_;
  int running_ = 0;  ///< the stage whose products run
};

template <class OfFormats, bool kSquares>
struct RescalingSums {
  using Formats = OfFormats;
  static_assert(Formats::kDepth == kScaleBlock, "a stage is a block");
  static constexpr Rows kRowsLie = Rows::along;
  static constexpr Columns kColumnsLie = Columns::along;
  template <class Memory>
  using On = Rescaling<Formats, kSquares, Memory>;

  static constexpr int kWriters = kSquares ? 2 : 3;
  static constexpr std::uint32_t beside(int columns) { return RatiosOfStage<kSquares>::bytes(columns); }

  /// The first warp writes the ratios of rows, four a thread, the others of columns, likewise, or of 32 columns.
  template <class Memory>
  static __device__ __forceinline__ void write_beside(const Operands& o, const Memory& shared, int thread) {
    using Ratios = RatiosOfStage<kSquares>;
    constexpr int kEach = kRows / 32, kColumns = kSquares ? Memory::kColumns / 32 : Memory::kColumns;
    constexpr int kAhead = 3;  // blocks whose scales are on their way: a load takes about as long as a stage
    const ScalesOfBlocks<kSquares> scales{o.scale_a, o.scale_b};
    const bool of_rows = thread < 32;
    const int first = of_rows ? thread : (thread - 32) / 32 * kRows + thread % 32;
    const BlockScales& of = of_rows ? o.scale_a : o.scale_b;
    tma::Ring<Memory::kStages> ring;
    for (Walk walk; walk.item < o.grid.items(); walk.item += walk.step) {
      const Item item = o.grid.at(walk.item);
      int places[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = first + 32 * i, column = min(at, kColumns - 1);
        places[i] = of_rows ? scales.row(item.row(0) + at)
                            : scales.column(item.column * Memory::kColumns + column * (kSquares ? 32 : 1));
      }
      float now[kEach] = {}, next[kAhead][kEach] = {};
      auto load = [&](float(&to)[kEach], int block) {
        if (block >= item.last) return;
#pragma unroll
        for (int i = 0; i < kEach; ++i) to[i] = of.at[block * of.step + places[i]];
      };
      load(now, item.first);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load(next[i], item.first + 1 + i);
      float ratios[kEach] = {1, 1, 1, 1};  // of the first block nobody reads any
      for (int begin = item.first; begin < item.last; begin += kAhead) {
#pragma unroll
        for (int ahead = 0; ahead < kAhead; ++ahead) {
          const int block = begin + ahead;
          if (block >= item.last) break;
          const std::uint32_t to = shared.beside(ring.stage);
          tma::wait(shared.empty(ring.stage), ring.parity ^ 1);
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            const int at = first + 32 * i;
            if (of_rows)
              Ratios::put(to + 4 * at, ratios[i]);
            else if (at < kColumns)
              Ratios::put(to + Ratios::kColumns + Ratios::place(at), ratios[i]);
          }
          tma::arrive_as_warp(shared.full(ring.stage));
          ring.advance();
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            ratios[i] = __fdividef(now[i], next[ahead][i]);
            now[i] = next[ahead][i];
          }
          load(next[ahead], block + 1 + kAhead);
        }
      }
    }
  }
};

}  // namespace quern::cuda::product
