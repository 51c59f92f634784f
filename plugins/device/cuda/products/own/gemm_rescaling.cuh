#pragma once
// Mainloop of GEMMs (gemm_wgmma.cuh) of 8-bit floats with scales for blocks of 128 elements along k
// (quern/block_scales.h); a stage is a block. To add each block's accumulators to others in fp32 takes an FFMA of three
// registers, which holds up the other consumer's wgmmas (docs/performance/cuda-fp8.md). Here accumulators stay in the
// tensor cores, in units of the scales of the block that was multiplied last, and before the next one they are
// multiplied by the ratio of these scales to its own. So accumulation is fast, in about 14 bits. They overflow where
// the factor of both scales falls by about 2^100 from any block to a later one. A block of zeros has scale 1, and where
// the others' are small, accumulators become small in its units: tensor cores keep them when zeros are added (seen on
// H100s).
//
// Warps beside the one that loads write a stage's ratios into shared memory. Consumers alternate: while one brings
// its accumulators to the next block's units, the other's wgmmas run.

#include <utility>

#include "products/own/gemm_scale_factors.cuh"

namespace quern::cuda::gemm {

/// Ratios of a stage in shared memory: of the tile's rows, then of each 32 columns, or of its columns as consumers
/// read them: a thread's two columns of a group of 8, beside the next group's.
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
};

template <class Formats, bool kSquares, class Memory>
class Rescaling {
 public:
  static constexpr int kAccumulators = Memory::kColumns / 2;

  __device__ Rescaling(const Operands& o, const Memory& shared, int number)
      : o_(o), shared_(shared), number_(number), stages_(shared) {
    if (number == 1) pass();
  }
  __device__ ~Rescaling() {
    if (number_ == 0) take_turn();  // the other's last pass
  }

  __device__ __forceinline__ void begin(const WorkTile& item, float (&sums)[kAccumulators]) {
    item_ = item;
    running_ = stages_.next();
    multiply(false, sums);
    for (int step = item.first + 1; step < item.last; ++step) {
      const int next = stages_.next();
      const std::uint32_t ratios = shared_.beside(next);
      const float of_rows[2] = {read_factor(ratios + 4 * row()), read_factor(ratios + 4 * (row() + 8))};
      const auto of_columns = ratios_of_columns(ratios + Ratios::kColumns);
      wgmma::wait<0>();
      scale(sums, of_rows, of_columns);
      const int done = std::exchange(running_, next);
      multiply(true, sums);
      stages_.free(done);  // behind what the other consumer waits for
    }
  }

  __device__ __forceinline__ void finish(float (&sums)[kAccumulators]) {
    const int block = item_.last - 1, first = item_.column * Memory::kColumns;
    float of_rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      of_rows[i] = scale_at(o_.scale_a, line_of(o_.scale_a, item_.row(0) + row() + 8 * i), block);
    auto at = [&](int column) {
      return scale_at(o_.scale_b, (kSquares ? square_of : line_of)(o_.scale_b, first + column), block);
    };
    if constexpr (kSquares) {
      OfSquares of_columns;
#pragma unroll
      for (int i = 0; i < kAccumulators / 16; ++i) of_columns.at[i] = at(32 * i);
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

  /// Of the tile, the first row of this thread's accumulators.
  __device__ int row() const { return number_ * kHalfRows + warp_row() + static_cast<int>(threadIdx.x) % 32 / 4; }

  /// Factors of this thread's columns of two groups of 8.
  struct OfSquares {
    float at[kAccumulators / 16];
    __device__ __forceinline__ float4 operator()(int pair) const {
      const float of = at[pair / 2];
      return {of, of, of, of};
    }
  };
  __device__ __forceinline__ auto ratios_of_columns(std::uint32_t from) const {
    if constexpr (kSquares) {
      OfSquares ratios;
#pragma unroll
      for (int i = 0; i < kAccumulators / 16; ++i) ratios.at[i] = read_factor(from + 4 * i);
      return ratios;
    } else {
      return [from](int pair) { return read_factors(from + 64 * pair + threadIdx.x % 4 * 16); };
    }
  }

  template <class OfColumns>
  __device__ static __forceinline__ void scale(float (&sums)[kAccumulators], const float (&of_rows)[2],
                                               const OfColumns& of_columns) {
    wgmma::pin(sums);
#pragma unroll
    for (int pair = 0; pair < kAccumulators / 8; ++pair) {
      const float4 of = of_columns(pair);
      const float by[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[8 * pair + i] *= of_rows[i / 2 % 2] * by[i / 4 * 2 + i % 2];
    }
  }

  __device__ __forceinline__ void multiply(bool add, float (&sums)[kAccumulators]) {
    const wgmma::Tile a = wgmma::k_major_tile(shared_.a(running_) + number_ * Memory::kA / kConsumers);
    const wgmma::Tile b = wgmma::k_major_tile(shared_.b(running_));
    take_turn();
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      Formats::template multiply<Rows::k_major, Columns::k_major>(sums, a + k * wgmma::kDepthBytes,
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
    asm volatile("bar.sync %0, %1;" ::"r"(1 + number_), "n"(kConsumerThreads) : "memory");
  }
  __device__ __forceinline__ void pass() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 - number_), "n"(kConsumerThreads) : "memory");
  }

  const Operands& o_;
  const Memory& shared_;
  const int number_;
  Stages<Memory> stages_;
  WorkTile item_;
  int running_ = 0;  ///< the stage whose wgmmas run
};

/// What warps write beside a stage (gemm_scale_factors.cuh): the first the ratios of rows, four a thread, the others of
/// columns, likewise, or of 32 columns.
template <bool kSquares, int kColumns>
struct ScaleRatios {
  static constexpr int kAhead = 3, kEach = kRows / 32, kPlaces = kSquares ? kColumns / 32 : kColumns;
  static __device__ __forceinline__ bool of_rows(int thread) { return thread < 32; }
  static __device__ __forceinline__ int place(int thread, int i) {
    return (of_rows(thread) ? thread : (thread - 32) / 32 * kRows + thread % 32) + 32 * i;
  }

  struct Scales {
    float of[kEach];
    __device__ __forceinline__ Scales over(const Scales& next) const {
      Scales ratio;
#pragma unroll
      for (int i = 0; i < kEach; ++i) ratio.of[i] = __fdividef(of[i], next.of[i]);
      return ratio;
    }
    __device__ __forceinline__ void write(std::uint32_t to, const Scales& ratio, int thread) const {
      using Ratios = RatiosOfStage<kSquares>;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = place(thread, i);
        if (of_rows(thread))
          put(to + 4 * at, ratio.of[i]);
        else if (at < kPlaces)
          put(to + Ratios::kColumns + Ratios::place(at), ratio.of[i]);
      }
    }
  };
  struct Source {
    const BlockScales& of;
    int places[kEach];
    __device__ __forceinline__ Source(const Operands& o, const WorkTile& item, int thread)
        : of(of_rows(thread) ? o.scale_a : o.scale_b) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = place(thread, i), column = min(at, kPlaces - 1) * (kSquares ? 32 : 1);
        places[i] = of_rows(thread) ? line_of(of, item.row(0) + at)
                                    : (kSquares ? square_of : line_of)(of, item.column * kColumns + column);
      }
    }
    __device__ __forceinline__ Scales at(int block) const {
      Scales scales;
#pragma unroll
      for (int i = 0; i < kEach; ++i) scales.of[i] = scale_at(of, places[i], block);
      return scales;
    }
  };
};

template <class OfFormats, bool kSquares>
struct RescalingMainloop {
  using Formats = OfFormats;
  static_assert(Formats::kDepth == kScaleBlock, "a stage is a block");
  static constexpr Rows kLayoutA = Rows::k_major;
  static constexpr Columns kLayoutB = Columns::k_major;
  template <class Memory>
  using On = Rescaling<Formats, kSquares, Memory>;

  static constexpr int kWriters = kSquares ? 2 : 3;
  static constexpr std::uint32_t beside(int columns) { return RatiosOfStage<kSquares>::bytes(columns); }
  template <class Memory>
  static __device__ __forceinline__ void write_beside(const Operands& o, const Memory& shared, int thread) {
    write_factors<ScaleRatios<kSquares, Memory::kColumns>>(o, shared, thread);
  }
};

}  // namespace quern::cuda::gemm
