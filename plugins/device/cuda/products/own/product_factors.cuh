#pragma once
// What sums of products with scales of blocks (product_rescaling.cuh, product_squares.cuh) have in common: where scales
// lie, and the warps that write factors made of them beside a stage's operands.

#include "products/own/product_wgmma.cuh"
#include "quern/block_scales.h"

namespace quern::cuda::product {

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

/// Where the scales of a row, or of a column, lie: its own, or those of 128. Past the end they are the last's: nothing
/// comes of them.
__device__ __forceinline__ int line_of(const BlockScales& scales, int at) { return min(at, scales.count - 1); }
__device__ __forceinline__ int square_of(const BlockScales& scales, int at) {
  return line_of(scales, at) / static_cast<int>(kScaleBlock) * scales.square;
}
/// A matrix of 2^31 scales has 2^38 elements.
__device__ __forceinline__ const float* of_block(const BlockScales& scales, int place, int block) {
  return scales.at + (block * scales.step + place);
}

/// What warps beside the one that loads do: of each block of the sums, what becomes of its scales and of their ratios
/// to those of the block before.
///
///   Factors
///     constexpr int kAhead;                         // blocks whose scales are on their way: a load takes about as
///     long
///                                                   // as a stage
///     struct Scales;                                // that a thread has of a block
///       Scales over(const Scales& next);            // ratios
///       void write(to, const Scales& ratio, thread);  // beside a stage
///     struct Source;                                // where they lie for an item: (operands, item, thread)
///       Scales at(operands, block);
template <class Factors, class Memory>
__device__ __forceinline__ void write_factors(const Operands& o, const Memory& shared, int thread) {
  constexpr int kAhead = Factors::kAhead;
  using Scales = typename Factors::Scales;
  tma::Ring<Memory::kStages> ring;
  for (Walk walk; walk.item < o.grid.items(); walk.item += walk.step) {
    const Item item = o.grid.at(walk.item);
    const typename Factors::Source source(o, item, thread);
    auto load = [&](Scales& to, int block) {
      if (block < item.last) to = source.at(o, block);
    };
    Scales now = {}, next[kAhead] = {}, ratio = {};  // of the first block nobody reads a ratio
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

}  // namespace quern::cuda::product
