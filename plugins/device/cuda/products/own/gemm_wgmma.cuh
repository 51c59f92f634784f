#pragma once
// A GEMM on Hopper's tensor cores with an epilogue between the accumulators and memory. Blocks are persistent
// and take tiles of 128 rows. Of a block's warps
//   two warpgroups      multiply, 64 rows each, and give their accumulators to an Epilogue: the consumers
//   a thread of others  keeps operands coming, by TMA into a ring of stages; two blocks, a cluster, have tiles one
//                       below the other and share their columns' operand, each loading half for both
//   more warps          may write what consumers read beside a stage's operands
// An accumulator is summed in the order of k by one warpgroup, or in fixed split-K parts: its bits depend on its place
// and the GEMM's shape alone. Operands, mainloop and epilogue are types:
//
//   Mainloop                               // StraightMainloop, below; gemm_transposing.cuh, gemm_rescaling.cuh
//     using Formats;                   //   of the operands, below
//     constexpr Rows kLayoutA;         //   the operands as stored
//     constexpr Columns kLayoutB;
//     class On<Memory>;                //   of each consumer thread: (operands, memory, consumer)
//       void begin(const WorkTile&, sums); //   accumulates an item's stages, of which the last may still run
//       void begin_stage(add, sums);   //   or, where an Epilogue works behind stages, the next one,
//       void expect_stage();           //   after this has done all that may precede that work
//       void finish(sums);             //   waits for it
//     constexpr int kWriters;          //   where there are any, the warps that write beside the operands
//     beside(columns);                 //   bytes of a stage, for tiles of so many columns
//     void write_beside(operands, memory, thread);
//   Epilogue                             // gemm_store_epilogue.cuh, gemm_overlapped_epilogue.cuh:
//     using Memory;                    //   Shared, below
//     struct Arguments;                //   of the kernel
//     constexpr int kWidth;            //   columns of the result that a tile is
//     Epilogue(arguments, memory, consumer);       // of each consumer thread
//     void prepare(const WorkTile&);                   // an item begins
//     void take(const WorkTile&, sums);                // its accumulators are complete
//     void end();                                  // nothing follows
//     static bool idle(arguments);                 // whether there is no work: the same in all threads
//   An Epilogue that has kParts works on an item while the next is multiplied, and instead of prepare and take has
//     constexpr int kParts;                        // of its work, spread over the stages of the next item
//     void expect(const WorkTile&);                // the next item, before the work on the kept one
//     void expect_none();                          // there is none
//     void keep(const WorkTile&, sums);            // its accumulators are complete
//     void work(int part);                         // on the kept item

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "primitives/divide.cuh"
#include "primitives/tensor_map.h"
#include "primitives/tma.cuh"
#include "primitives/vector.cuh"
#include "primitives/wgmma.cuh"

namespace quern::cuda::gemm {

inline constexpr int kRows = 128;                                     ///< of a tile
inline constexpr int kSteps = wgmma::kRowBytes / wgmma::kDepthBytes;  ///< wgmmas of a stage
inline constexpr int kConsumers = 2, kCluster = 2, kConsumerThreads = 128 * kConsumers,
                     kThreads = kConsumerThreads + 128;
inline constexpr int kHalfRows = kRows / kConsumers;
inline constexpr int kAnyStages = 1 << 20;  ///< as many as there is room for

/// The second operand as stored, or its halves.
enum class Columns {
  k_major,   ///< (columns, k): two boxes of half a tile's columns
  dealt,     ///< the same, of 8 bits, in the order of dealt_tensor_map: of each 32 columns a thread accumulates eight
             ///< neighbours, from 8 (lane % 4) on
  mn_major,  ///< (k, columns), of bf16: boxes of 64 columns (set_mn_major)
};

/// The first operand as stored.
enum class Rows {
  k_major,   ///< (rows, k)
  paired,    ///< the same, of 8 bits, in the order of paired_tensor_map: a thread's two rows are neighbours
  mn_major,  ///< (k, rows): of bf16 two boxes of 64 rows, one a consumer; of 8 bits one, transposed on the way from
             ///< shared memory to registers
};

/// The operands' formats, and wgmmas of 64 rows.
struct OfBf16 {
  using Sum = float;
  static constexpr int kDepth = wgmma::kRowBytes / 2;  ///< elements along k of a stage
  template <Rows kLayoutA, Columns kLayoutB, int kCount>
  static __device__ __forceinline__ void multiply(Sum (&sums)[kCount], wgmma::Tile a, wgmma::Tile b, bool add) {
    wgmma::multiply<kLayoutA == Rows::mn_major, kLayoutB == Columns::mn_major>(sums, a, b, add);
  }
};
template <DType kA, DType kB>
struct OfFloat8 {
  using Sum = float;
  static constexpr int kDepth = wgmma::kRowBytes;
  template <int kCount>
  static __device__ __forceinline__ void multiply(Sum (&sums)[kCount], const std::uint32_t* a, wgmma::Tile b,
                                                  bool add) {
    wgmma::multiply<kA, kB>(sums, a, b, add);
  }
  template <Rows kLayoutA, Columns kLayoutB, int kCount>
  static __device__ __forceinline__ void multiply(Sum (&sums)[kCount], wgmma::Tile a, wgmma::Tile b, bool add) {
    static_assert(kLayoutA != Rows::mn_major && kLayoutB != Columns::mn_major, "operands of 8 bits lie along k");
    wgmma::multiply<kA, kB>(sums, a, b, add);
  }
};
struct OfI8 {
  using Sum = std::int32_t;
  static constexpr int kDepth = wgmma::kRowBytes;
  template <Rows kLayoutA, Columns kLayoutB, int kCount>
  static __device__ __forceinline__ void multiply(Sum (&sums)[kCount], wgmma::Tile a, wgmma::Tile b, bool add) {
    static_assert(kLayoutA != Rows::mn_major && kLayoutB != Columns::mn_major, "operands of 8 bits lie along k");
    wgmma::multiply(sums, a, b, add);
  }
};

/// A cluster's unit of work: a pair of tiles, or a split-K part of it.
struct WorkTile {
  int row_pair, column;  ///< of the tiles
  int first, last;       ///< stages along k
  int part;              ///< its number among all parts; -1: the whole

  /// The first row of a consumer.
  __device__ int row(int consumer) const {
    return (row_pair * kCluster + static_cast<int>(tma::cluster_rank())) * kRows + consumer * kHalfRows;
  }
};

/// Tiles in the order in which they are taken: over all columns, kGroup pairs of tiles after another, so that data
/// which blocks read at a time stay in the L2 cache. Tiles that would leave clusters idle at the end are split along k.
struct Grid {
  static constexpr int kGroup = 8;

  int row_pairs, columns;
  int steps;  ///< stages along k
  int whole;  ///< pairs of tiles that are not split: the first
  int parts;  ///< of each of the others
  FastDivide by_group{static_cast<std::uint32_t>(std::max(kGroup * columns, 1))};
  FastDivide by_rest{static_cast<std::uint32_t>(std::max(row_pairs % kGroup, 1))};  ///< pairs of the last group

  __host__ __device__ int tiles() const { return row_pairs * columns; }
  __host__ __device__ int items() const { return whole + (tiles() - whole) * parts; }
  __device__ WorkTile at(int item) const {
    if (item < whole) return of_tile(item);
    const int divided = tiles() - whole, number = item - whole, part = number / divided;
    WorkTile of = of_tile(whole + number % divided);
    of.first = steps * part / parts;
    of.last = steps * (part + 1) / parts;
    of.part = number;
    return of;
  }
  __device__ WorkTile of_tile(int tile) const {
    std::uint32_t inside, row;
    const int first = static_cast<int>(by_group.divide(static_cast<std::uint32_t>(tile), inside)) * kGroup;
    std::uint32_t column = inside / kGroup;
    row = inside % kGroup;
    if (first + kGroup > row_pairs) column = by_rest.divide(inside, row);
    return {first + static_cast<int>(row), static_cast<int>(column), 0, steps, -1};
  }
};

/// Block scales of an operand (quern/block_scales.h).
struct BlockScales {
  const float* at = nullptr;
  int count = 0;   ///< of its rows, in the GEMM's view
  int step = 1;    ///< from a block along k to the next
  int square = 0;  ///< from 128 rows to the next, where these have one
};

struct Operands {
  CUtensorMap a;     ///< (rows, k), or as Rows says
  CUtensorMap b[2];  ///< of each half of a tile's columns, which a block loads for both; or as set_mn_major has them
  int b_step[2];     ///< where tile j's half, or not K-major tile j, begins: j * b_step + b_first
  int b_first[2];
  Grid grid;
  BlockScales scale_a, scale_b;  ///< where there are any
};

/// Shared memory, in bytes from an address that is a multiple of 1024: a ring of as many stages as there is room for,
/// at most `kMost`, and `kResultBytes` of results. A stage has `kLoaded` columns of the second operand, and
/// `kBesideBytes` that warps write.
template <int kTileColumns, std::uint32_t kResultBytes, int kLoaded = kTileColumns, std::uint32_t kBesideBytes = 0,
          int kMost = kAnyStages>
struct Shared {
  static constexpr std::uint32_t kA = kRows * wgmma::kRowBytes, kB = kLoaded * wgmma::kRowBytes, kStage = kA + kB;
  static_assert(kB / 2 % wgmma::kEightRows == 0, "a half begins where the swizzle does");
  static constexpr std::uint32_t kRoom = 232448 - 1024;  ///< the most that a block can have, less alignment
  static constexpr int kColumns = kTileColumns,
                       kStages = std::min<int>(kMost, (kRoom - kResultBytes) / (kStage + kBesideBytes + 16));
  static_assert(kResultBytes < kRoom && kStages >= 3);
  static constexpr std::uint32_t kResults = kStages * kStage, kBeside = kResults + kResultBytes,
                                 kBarriers = kBeside + kStages * kBesideBytes;
  static constexpr std::uint32_t kBytes = kBarriers + 16 * kStages + 1024;

  std::uint32_t base;
  __device__ std::uint32_t a(int stage) const { return base + stage * kStage; }
  __device__ std::uint32_t b(int stage) const { return a(stage) + kA; }
  __device__ std::uint32_t results() const { return base + kResults; }
  __device__ std::uint32_t beside(int stage) const { return base + kBeside + stage * kBesideBytes; }
  __device__ std::uint32_t full(int stage) const { return base + kBarriers + 8 * stage; }
  __device__ std::uint32_t empty(int stage) const { return full(kStages + stage); }
};

/// The items of one cluster.
struct Walk {
  int item, step;
  __device__ Walk() : item(static_cast<int>(blockIdx.x) / kCluster), step(static_cast<int>(gridDim.x) / kCluster) {}
};

template <class Mainloop, class Memory>
__device__ __forceinline__ void produce(const Operands& o, const Memory& shared) {
  const auto rank = static_cast<int>(tma::cluster_rank());
  constexpr std::uint16_t kBoth = 3;
  constexpr int kDepth = Mainloop::Formats::kDepth;
  tma::Ring<Memory::kStages> ring;
  for (Walk walk; walk.item < o.grid.items(); walk.item += walk.step) {
    const WorkTile item = o.grid.at(walk.item);
    const int row = item.row(0), column = item.column * o.b_step[rank] + o.b_first[rank];
    for (int step = item.first; step < item.last; ++step, ring.advance()) {
      const std::uint32_t full = shared.full(ring.stage);
      tma::wait(shared.empty(ring.stage), ring.parity ^ 1);
      tma::arrive_expecting(full, Memory::kStage);
      if constexpr (Mainloop::kLayoutA == Rows::k_major) {
        tma::load_box(shared.a(ring.stage), o.a, step * kDepth, row, 0, full);
      } else if constexpr (Mainloop::kLayoutA == Rows::paired) {
        tma::load_paired_box(shared.a(ring.stage), o.a, step * kDepth, row / kPairedRows, full);
      } else {
#pragma unroll
        for (int at = 0; at < kRows; at += kDepth)  // boxes are as wide as long: swizzled rows
          tma::load_box(shared.a(ring.stage) + at * wgmma::kRowBytes, o.a, row + at, step * kDepth, 0, full);
      }
      const std::uint32_t to = shared.b(ring.stage) + rank * (Memory::kB / 2);
      if constexpr (Mainloop::kLayoutB == Columns::k_major) {
        tma::load_box_to(to, o.b[rank], step * kDepth, column, 0, full, kBoth);
      } else if constexpr (Mainloop::kLayoutB == Columns::dealt) {
        tma::load_dealt_box_to(to, o.b[rank], step * kDepth, column / kDealtRows, full, kBoth);
      } else {
        constexpr std::uint32_t kBox = kDepth * wgmma::kRowBytes;
        constexpr int kBoxes = Memory::kB / kBox, kEach = kBoxes / kCluster;
        auto load = [&](int box, const CUtensorMap& map, int half) {
          tma::load_box_to(shared.b(ring.stage) + box * kBox + half * (kBox / 2), map, column + box * wgmma::kColumns,
                           step * kDepth + half * (kDepth / 2), 0, full, kBoth);
        };
#pragma unroll
        for (int i = 0; i < kEach; ++i) load(rank * kEach + i, o.b[0], 0);
        if constexpr (kBoxes % kCluster != 0) load(kBoxes - 1, o.b[1], rank);
      }
    }
  }
}

/// This warp is done with a stage, which both blocks fill.
__device__ __forceinline__ void release(std::uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kCluster) tma::arrive_at(barrier, threadIdx.x % 32);
}

/// Rows of a consumer's half that a warp has, from this one on.
__device__ __forceinline__ int warp_row() { return static_cast<int>(threadIdx.x) % 128 / 32 * 16; }

/// The stages that a consumer works on, one after another.
template <class Memory>
class Stages {
 public:
  __device__ explicit Stages(const Memory& shared) : shared_(shared) {}

  /// Waits for the next one.
  __device__ __forceinline__ int next() {
    const int stage = ring_.stage;
    tma::wait(shared_.full(stage), ring_.parity);
    ring_.advance();
    return stage;
  }
  /// A stage is read no more.
  __device__ __forceinline__ void free(int stage) const { release(shared_.empty(stage)); }

 private:
  const Memory& shared_;
  tma::Ring<Memory::kStages> ring_;
};

/// The stages of groups of wgmmas, of which one runs while the next is begun.
template <class Memory>
class OverlappedStages : public Stages<Memory> {
 public:
  using Stages<Memory>::Stages;

  /// A stage's group was begun: waits for the one before.
  __device__ __forceinline__ void begun(int stage) {
    wgmma::commit();
    wgmma::wait<1>();
    if (previous_ >= 0) this->free(previous_);
    previous_ = stage;
  }
  /// Waits for the group that was begun last.
  __device__ __forceinline__ void finish() {
    wgmma::wait<0>();
    this->free(previous_);
    previous_ = -1;
  }
  /// The stage that was begun last.
  __device__ __forceinline__ int running() const { return previous_; }

 private:
  int previous_ = -1;
};

template <class Mainloop>
concept WritesBeside = requires {
  Mainloop::kWriters;
};

/// What warps write of each stage, for tiles of so many columns.
template <class Mainloop>
constexpr std::uint32_t beside_bytes(int columns) {
  if constexpr (WritesBeside<Mainloop>)
    return Mainloop::beside(columns);
  else
    return 0;
}

/// Both operands are multiplied as stored in shared memory, of bf16 K-major or not.
template <class Formats, Rows kLayoutA, Columns kLayoutB, class Memory>
class Straight {
 public:
  using Sum = typename Formats::Sum;
  static constexpr int kAccumulators = Memory::kColumns / 2;

  __device__ Straight(const Operands&, const Memory& shared, int number)
      : shared_(shared), number_(number), stages_(shared) {}

  __device__ __forceinline__ void begin(const WorkTile& item, Sum (&sums)[kAccumulators]) {
    for (int step = item.first; step < item.last; ++step) begin_stage(step > item.first, sums);
  }
  __device__ __forceinline__ void expect_stage() {}
  /// The next stage's wgmmas, added to the accumulators.
  __device__ __forceinline__ void begin_stage(bool add, Sum (&sums)[kAccumulators]) {
    using A = Staged<kLayoutA == Rows::mn_major>;
    using B = Staged<kLayoutB == Columns::mn_major>;
    const int stage = stages_.next();
    const wgmma::Tile a = A::tile(shared_.a(stage) + number_ * Memory::kA / kConsumers);
    const wgmma::Tile b = B::tile(shared_.b(stage));
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      Formats::template multiply<kLayoutA, kLayoutB>(sums, a + k * A::kStep, b + k * B::kStep, add || k > 0);
    stages_.begun(stage);
  }
  __device__ __forceinline__ void finish(Sum (&sums)[kAccumulators]) {
    stages_.finish();
    wgmma::pin(sums);
  }

 private:
  /// An operand's tile in a stage, and its steps along k.
  template <bool kMnMajor>
  struct Staged {
    static constexpr std::uint32_t kStep = kMnMajor ? wgmma::kMnMajorDepthBytes : wgmma::kDepthBytes;
    static __device__ __forceinline__ wgmma::Tile tile(std::uint32_t address) {
      return kMnMajor ? wgmma::mn_major_tile<Formats::kDepth * wgmma::kRowBytes>(address)
                      : wgmma::k_major_tile(address);
    }
  };

  const Memory& shared_;
  const int number_;
  OverlappedStages<Memory> stages_;
};

template <class OfFormats, Columns kOfColumns, Rows kOfRows = Rows::k_major>
struct StraightMainloop {
  using Formats = OfFormats;
  static constexpr Rows kLayoutA = kOfRows;
  static constexpr Columns kLayoutB = kOfColumns;
  template <class Memory>
  using On = Straight<Formats, kOfRows, kOfColumns, Memory>;
};

template <class Mainloop, class Epilogue>
__device__ __forceinline__ void multiply(const Operands& o, const typename Epilogue::Memory& shared, int number,
                                         Epilogue& finish) {
  using Memory = typename Epilogue::Memory;
  typename Mainloop::template On<Memory> consumer(o, shared, number);
  typename Mainloop::Formats::Sum sums[Memory::kColumns / 2];
  Walk walk;
  WorkTile next = o.grid.at(walk.item);
  while (walk.item < o.grid.items()) {
    const WorkTile item = next;
    finish.prepare(item);
    consumer.begin(item, sums);
    walk.item += walk.step;
    if (walk.item < o.grid.items()) next = o.grid.at(walk.item);  // while wgmmas run
    consumer.finish(sums);
    finish.take(item, sums);
  }
  finish.end();
}

template <class Epilogue>
concept IsOverlapped = requires {
  Epilogue::kParts;
};

/// The same where the Epilogue works on an item while the next is multiplied, so that memory and consumers are busy
/// together. The stages of an item, which is a whole tile, are dealt into kParts shares; behind the last stage of each
/// runs one part of the work. No share is empty (grid_of): a branch around wgmmas makes them wait for each other.
/// Behind the last item the Epilogue works alone.
template <class Mainloop, class Epilogue>
requires IsOverlapped<Epilogue> __device__ __forceinline__ void multiply(const Operands& o,
                                                                         const typename Epilogue::Memory& shared,
                                                                         int number, Epilogue& finish) {
  using Memory = typename Epilogue::Memory;
  typename Mainloop::template On<Memory> consumer(o, shared, number);
  typename Mainloop::Formats::Sum sums[Memory::kColumns / 2];
  Walk walk;
  WorkTile next = o.grid.at(walk.item);
  if (walk.item < o.grid.items()) consumer.expect_stage();
  while (walk.item < o.grid.items()) {
    const WorkTile item = next;
    finish.expect(item);
    walk.item += walk.step;
    const bool more = walk.item < o.grid.items();
#pragma unroll
    for (int part = 0; part < Epilogue::kParts; ++part) {
      const int last = o.grid.steps * (part + 1) / Epilogue::kParts;
      for (int step = o.grid.steps * part / Epilogue::kParts;;) {
        consumer.begin_stage(part > 0 || step > 0, sums);
        if (++step == last) break;  // this branch keeps the compiler from starting wgmmas amid a part's work
        consumer.expect_stage();
      }
      if (part + 1 < Epilogue::kParts || more) consumer.expect_stage();
      finish.work(part);
    }
    if (more) next = o.grid.at(walk.item);
    consumer.finish(sums);
    finish.keep(item, sums);
  }
  finish.expect_none();
#pragma unroll
  for (int part = 0; part < Epilogue::kParts; ++part) finish.work(part);
  finish.end();
}

template <class Mainloop, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ Operands o, const __grid_constant__ typename Epilogue::Arguments arguments) {
  if (Epilogue::idle(arguments)) return;
  using Memory = typename Epilogue::Memory;
  // Registers of a consumer thread and of another: 2 kTaken + kGiven <= 3 x 168.
  constexpr int kMore = IsOverlapped<Epilogue> ? 16 : 8, kLess = WritesBeside<Mainloop> ? 8 : 0;
  constexpr int kTaken = 224 + kMore - kLess, kGiven = 504 - 2 * kTaken;
  extern __shared__ unsigned char memory[];
  const Memory shared{(tma::shared_address(memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * kConsumers;
    int filling = 1;
    if constexpr (WritesBeside<Mainloop>) filling += Mainloop::kWriters * tma::kWarpArrivals;
    for (int stage = 0; stage < Memory::kStages; ++stage) {
      tma::init(shared.full(stage), filling);
      tma::init(shared.empty(stage), kWarps * kCluster);
    }
    tma::fence_init();
  }
  tma::synchronize_cluster();
  if (threadIdx.x < kConsumerThreads) {
    wgmma::take_registers<kTaken>();
    const int consumer = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    Epilogue finish(arguments, shared, consumer);
    multiply<Mainloop>(o, shared, consumer, finish);
  } else {
    wgmma::give_registers<kGiven>();
    if (threadIdx.x == kConsumerThreads) produce<Mainloop>(o, shared);
    if constexpr (WritesBeside<Mainloop>) {
      const int thread = static_cast<int>(threadIdx.x) - (kConsumerThreads + 32);
      if (thread >= 0 && thread < 32 * Mainloop::kWriters) Mainloop::write_beside(o, shared, thread);
    }
  }
  __syncwarp();
  tma::synchronize_cluster();  // nobody leaves while the other block may write to it or signal it
}

}  // namespace quern::cuda::gemm
