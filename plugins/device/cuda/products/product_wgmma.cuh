#pragma once
// A product of matrices on Hopper's tensor cores whose results pass through an epilogue before they are written: what
// would follow as an op of its own runs beside the next product and reads nothing from memory again. Blocks stay and
// take tiles of 128 x 256 sums. Of a block's three warpgroups
//   the second and third    multiply, 64 rows each, and put their sums, scaled and rounded to bf16, into shared memory
//   the first, three warps  run the epilogue there while the others are at the next tile
//   the first, one thread   keeps operands coming, by TMA into a ring of stages; two blocks, a cluster, have tiles one
//                           below the other and share their columns' operand, each loading half for both
// A sum is added up in the order of k by one warpgroup: its bits depend on its row and column alone. What is
// multiplied, how sums become values and the epilogue are types:
//
//   Formats                            // of the operands, below
//   Scaling                            // product_scaling.cuh
//   Epilogue                           // run_epilogue, below

#include <cstdint>

#include "primitives/tma.cuh"
#include "primitives/vector.cuh"
#include "primitives/wgmma.cuh"
#include "products/product_scaling.cuh"

namespace quern::cuda::product {

inline constexpr int kRows = 128, kColumns = 256;                     ///< of a tile
inline constexpr int kSteps = wgmma::kRowBytes / wgmma::kDepthBytes;  ///< products of a stage
inline constexpr int kStages = 3, kMultipliers = 2, kCluster = 2;
inline constexpr int kThreads = 128 * (1 + kMultipliers), kEpilogueWarps = 3;
inline constexpr int kHalf = kColumns / 2, kHalfRows = kRows / kMultipliers;

/// The second operand as stored, or its halves.
enum class Columns {
  along,   ///< (columns, k): two boxes of 128 rows
  across,  ///< (k, columns), of bf16: four boxes of 64 columns
};

/// What is multiplied, as products of 64 x 256 sums.
struct OfBf16 {
  using Sum = float;
  static constexpr int kDepth = wgmma::kRowBytes / 2;  ///< elements along k of a stage
  template <Columns kLayout>
  static __device__ __forceinline__ void multiply(Sum (&sums)[kColumns / 2], wgmma::Tile a, wgmma::Tile b, bool add) {
    wgmma::multiply<kLayout == Columns::across>(sums, a, b, add);
  }
};
template <DType kA, DType kB>
struct OfFloat8 {
  using Sum = float;
  static constexpr int kDepth = wgmma::kRowBytes;
  template <Columns kLayout>
  static __device__ __forceinline__ void multiply(Sum (&sums)[kColumns / 2], wgmma::Tile a, wgmma::Tile b, bool add) {
    static_assert(kLayout == Columns::along, "operands of 8 bits lie along k");
    wgmma::multiply<kA, kB>(sums, a, b, add);
  }
};
struct OfI8 {
  using Sum = std::int32_t;
  static constexpr int kDepth = wgmma::kRowBytes;
  template <Columns kLayout>
  static __device__ __forceinline__ void multiply(Sum (&sums)[kColumns / 2], wgmma::Tile a, wgmma::Tile b, bool add) {
    static_assert(kLayout == Columns::along, "operands of 8 bits lie along k");
    wgmma::multiply(sums, a, b, add);
  }
};

/// Tiles in the order in which they are taken: over all columns, `group` pairs of tiles after another, so that what
/// blocks read at a time stays in the L2 cache.
struct Grid {
  int row_pairs, columns, group;
  struct Place {
    int row_pair, column;
  };
  __device__ Place at(int tile) const {
    const int first = tile / (group * columns) * group, inside = tile - first * columns;
    const int rows = min(group, row_pairs - first);
    return {first + inside % rows, inside / rows};
  }
  __host__ __device__ int tiles() const { return row_pairs * columns; }
};

struct Operands {
  CUtensorMap a;     ///< (rows, k)
  CUtensorMap b[2];  ///< of each half of a tile's columns
  int b_step[2];     ///< where tile j's half begins: j * b_step + b_first
  int b_first[2];
  int steps;  ///< along k
  Grid grid;
};

/// Shared memory, in bytes from an address that is a multiple of 1024.
struct Shared {
  static constexpr std::uint32_t kA = kRows * wgmma::kRowBytes, kB = kColumns * wgmma::kRowBytes, kStage = kA + kB;
  static constexpr std::uint32_t kTile = kStages * kStage, kTileRow = kColumns * sizeof(bf16);
  static constexpr std::uint32_t kBarriers = kTile + kRows * kTileRow;
  static constexpr std::uint32_t kBytes = kBarriers + 16 * kStages + 1024;  ///< 1024: what alignment may take

  std::uint32_t base;
  __device__ std::uint32_t a(int stage) const { return base + stage * kStage; }
  __device__ std::uint32_t b(int stage) const { return a(stage) + kA; }
  __device__ std::uint32_t full(int stage) const { return base + kBarriers + 8 * stage; }
  __device__ std::uint32_t empty(int stage) const { return full(kStages + stage); }
  /// Sixteen bytes of the finished tile, `pack` along the row; rows lie so that columns of packs hit all banks.
  __device__ std::uint32_t pack(int row, int pack) const {
    return base + kTile + row * kTileRow + ((pack ^ row % 8) << 4);
  }
};

__device__ __forceinline__ Pack<bf16> read_pack(std::uint32_t address) {
  Pack<bf16> pack;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "r"(address)
               : "memory");
  return pack;
}

// Multiplier m and the epilogue tell each other with barriers of the block: its half of a tile is there, or read.
__device__ __forceinline__ void wait_for(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(128 + 32 * kEpilogueWarps) : "memory");
}
__device__ __forceinline__ void tell(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(128 + 32 * kEpilogueWarps) : "memory");
}
__device__ __forceinline__ int filled(int multiplier) { return 1 + multiplier; }
__device__ __forceinline__ int drained(int multiplier) { return 1 + kMultipliers + multiplier; }

/// The tiles of one cluster.
struct Walk {
  int tile, step;
  __device__ Walk() : tile(static_cast<int>(blockIdx.x) / kCluster), step(static_cast<int>(gridDim.x) / kCluster) {}
};

template <class Formats, Columns kLayout>
__device__ __forceinline__ void produce(const Operands& o, const Shared& shared) {
  const auto rank = static_cast<int>(tma::cluster_rank());
  constexpr std::uint16_t kBoth = 3;
  constexpr int kDepth = Formats::kDepth;
  tma::Ring<kStages> ring;
  for (Walk walk; walk.tile < o.grid.tiles(); walk.tile += walk.step) {
    const Grid::Place place = o.grid.at(walk.tile);
    const int row = (place.row_pair * kCluster + rank) * kRows;
    const int column = place.column * o.b_step[rank] + o.b_first[rank];
    for (int step = 0; step < o.steps; ++step, ring.advance()) {
      const std::uint32_t full = shared.full(ring.stage);
      tma::wait(shared.empty(ring.stage), ring.parity ^ 1);
      tma::arrive_expecting(full, Shared::kStage);
      tma::load_box(shared.a(ring.stage), o.a, step * kDepth, row, 0, full);
      const std::uint32_t to = shared.b(ring.stage) + rank * (Shared::kB / 2);
      if constexpr (kLayout == Columns::along) {
        tma::load_box_to(to, o.b[rank], step * kDepth, column, 0, full, kBoth);
      } else {
        tma::load_box_to(to, o.b[rank], column, step * kDepth, 0, full, kBoth);
        tma::load_box_to(to + Shared::kB / 4, o.b[rank], column + wgmma::kColumns, step * kDepth, 0, full, kBoth);
      }
    }
  }
}

/// This warp is done with a stage, which both blocks fill.
__device__ __forceinline__ void release(std::uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kCluster) tma::arrive_at(barrier, threadIdx.x % 32);
}

/// Rows of a multiplier's half that a warp has, from this one on.
__device__ __forceinline__ int warp_row() { return static_cast<int>(threadIdx.x) % 128 / 32 * 16; }

/// A multiplier's sums, scaled and rounded, to its half of the tile.
template <class Sum, class Scaling>
__device__ __forceinline__ void hand_over(const Shared& shared, int multiplier, const Sum (&sums)[kColumns / 2],
                                          const Scaling& scaling) {
  const int lane = threadIdx.x % 32, row = multiplier * kHalfRows + warp_row() + lane % 16;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = 4 * (j + i);
      const Sum of[4] = {sums[from], sums[from + 1], sums[from + 2], sums[from + 3]};
      float made[4];
      scaling.scale(j + i, of, made);
#pragma unroll
      for (int v = 0; v < 4; ++v) values[4 * i + v] = made[v];
    }
    wgmma::store_rounded(shared.pack(row, j + lane / 16), values);
  }
}

template <class Formats, Columns kLayout, class Scaling>
__device__ __forceinline__ void multiply(const Operands& o, const Shared& shared, Scaling& scaling) {
  const int multiplier = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  constexpr std::uint32_t kBoxBytes = Formats::kDepth * wgmma::kRowBytes;
  typename Formats::Sum sums[kColumns / 2];
  tma::Ring<kStages> ring;
  bool first = true;
  for (Walk walk; walk.tile < o.grid.tiles(); walk.tile += walk.step, first = false) {
    const Grid::Place place = o.grid.at(walk.tile);
    scaling.prepare((place.row_pair * kCluster + static_cast<int>(tma::cluster_rank())) * kRows +
                        multiplier * kHalfRows + warp_row(),
                    place.column);
    int previous = -1;
    for (int step = 0; step < o.steps; ++step, ring.advance()) {
      tma::wait(shared.full(ring.stage), ring.parity);
      const wgmma::Tile a = wgmma::along_rows(shared.a(ring.stage) + multiplier * Shared::kA / kMultipliers);
      const wgmma::Tile b = kLayout == Columns::along ? wgmma::along_rows(shared.b(ring.stage))
                                                      : wgmma::across_rows<kBoxBytes>(shared.b(ring.stage));
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        Formats::template multiply<kLayout>(sums, a + k * wgmma::kDepthBytes,
                                            b + k * (kLayout == Columns::along ? wgmma::kDepthBytes : 2048),
                                            step > 0 || k > 0);
      wgmma::commit();
      if (previous >= 0) {
        wgmma::wait<1>();
        release(shared.empty(previous));
      }
      previous = ring.stage;
    }
    wgmma::wait<0>();
    wgmma::pin(sums);
    release(shared.empty(previous));
    if (!first) wait_for(drained(multiplier));
    hand_over(shared, multiplier, sums, scaling);
    tell(filled(multiplier));
  }
}

/// Runs `epilogue(shared, half, row, column)` over halves of tiles: rows [0, 64) from `row` on, of tile column
/// `column`.
template <class Epilogue>
__device__ __forceinline__ void run_epilogue(const Grid& grid, const Shared& shared, Epilogue& epilogue) {
  const auto rank = static_cast<int>(tma::cluster_rank());
  for (Walk walk; walk.tile < grid.tiles(); walk.tile += walk.step) {
    const Grid::Place place = grid.at(walk.tile);
    for (int half = 0; half < kMultipliers; ++half) {
      const int row = (place.row_pair * kCluster + rank) * kRows + half * kHalfRows;
      epilogue.prepare(row, place.column);
      wait_for(filled(half));
      epilogue.run(shared, half, row, place.column);
      if (walk.tile + walk.step < grid.tiles()) tell(drained(half));
    }
  }
}

/// `kLayout` of the second operand; Scaling and Epilogue made from their arguments.
template <class Formats, Columns kLayout, class Scaling, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ Operands o, const __grid_constant__ typename Scaling::Arguments of_sums,
                   const __grid_constant__ typename Epilogue::Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  const Shared shared{(tma::shared_address(memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * kMultipliers;
    for (int stage = 0; stage < kStages; ++stage) {
      tma::init(shared.full(stage), 1);
      tma::init(shared.empty(stage), kWarps * kCluster);
    }
    tma::fence_init();
  }
  tma::synchronize_cluster();
  if (threadIdx.x >= 128) {
    Scaling scaling(of_sums);
    multiply<Formats, kLayout>(o, shared, scaling);
  } else if (threadIdx.x >= 32) {
    Epilogue epilogue(arguments);
    run_epilogue(o.grid, shared, epilogue);
  } else if (threadIdx.x == 0) {
    produce<Formats, kLayout>(o, shared);
  }
  __syncwarp();
  tma::synchronize_cluster();  // nobody leaves while the other block may write to it or tell it something
#else
  __trap();  // only code for sm_90a can do it
#endif
}

}  // namespace quern::cuda::product
