#pragma once
// A Finish of products (product_wgmma.cuh) whose epilogue has warps of its own: multipliers put their sums, rounded to
// bf16, into shared memory, and three warps run the epilogue there while the next tile is multiplied.
//
//   Epilogue
//     struct Arguments;
//     constexpr int kWidth;                              // columns of the result that a tile is
//     Epilogue(arguments);
//     void prepare(int row, int column);                 // before the half is there: its first row, the tile's column
//     void run(memory, int half, int row, int column);   // rows [0, 64) from `row` on

#include "products/own/product_wgmma.cuh"

namespace quern::cuda::product {

inline constexpr int kEpilogueWarps = 3;

/// Tiles of 128 x 256, the last of which lies behind the ring.
struct TileMemory : Shared<256, 3, kRows * 256 * sizeof(bf16)> {
  /// Sixteen bytes of the finished tile, `pack` along the row; rows lie so that columns of packs hit all banks.
  __device__ std::uint32_t pack(int row, int pack) const {
    return results() + row * kColumns * sizeof(bf16) + ((pack ^ row % 8) << 4);
  }
};

// Multiplier m and the epilogue tell each other with barriers of the block: its half of a tile is there, or read.
__device__ __forceinline__ void wait_for(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(128 + 32 * kEpilogueWarps) : "memory");
}
__device__ __forceinline__ void tell(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(128 + 32 * kEpilogueWarps) : "memory");
}
__device__ __forceinline__ int filled(int multiplier) { return 1 + multiplier; }
__device__ __forceinline__ int drained(int multiplier) { return 1 + kMultipliers + multiplier; }

/// This thread's number among the epilogue's.
__device__ __forceinline__ int epilogue_thread() { return static_cast<int>(threadIdx.x) - kMultiplying - 32; }

template <class Epilogue>
class HandedOver {
 public:
  using Memory = TileMemory;
  using Arguments = typename Epilogue::Arguments;
  static constexpr int kWidth = Epilogue::kWidth;
  static constexpr bool kAssists = true;
  static __device__ bool idle(const Arguments&) { return false; }

  __device__ HandedOver(const Arguments&, const Memory& memory, int multiplier)
      : memory_(memory), multiplier_(multiplier) {}
  __device__ void prepare(const Item&) {}

  __device__ __forceinline__ void take(const Item&, const float (&sums)[Memory::kColumns / 2]) {
    if (!first_) wait_for(drained(multiplier_));
    first_ = false;
    const int lane = threadIdx.x % 32, row = multiplier_ * kHalfRows + warp_row() + lane % 16;
#pragma unroll
    for (int j = 0; j < Memory::kColumns / 8; j += 2) {
      float values[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i / 4][i % 4] = sums[4 * j + i];
      wgmma::store_rounded(memory_.pack(row, j + lane / 16), values);
    }
    tell(filled(multiplier_));
  }

  __device__ void end() {}

  static __device__ void assist(const Grid& grid, const Memory& memory, const Arguments& arguments) {
    Epilogue epilogue(arguments);
    for (Walk walk; walk.item < grid.items(); walk.item += walk.step) {
      const Item item = grid.at(walk.item);
      for (int half = 0; half < kMultipliers; ++half) {
        epilogue.prepare(item.row(half), item.column);
        wait_for(filled(half));
        epilogue.run(memory, half, item.row(half), item.column);
        if (walk.item + walk.step < grid.items()) tell(drained(half));
      }
    }
  }

 private:
  const Memory& memory_;
  int multiplier_;
  bool first_ = true;
};

}  // namespace quern::cuda::product
