#pragma once
// An Epilogue of GEMMs (gemm_wgmma.cuh) that keeps a tile's accumulators, rounded to bf16, in the consumers'
// registers, where an EpilogueOp works on them beside the next tile's mainloop. Shared memory, whose bandwidth
// the mainloop needs, is left to the EpilogueOp.
//
//   EpilogueOp
//     struct Arguments;
//     constexpr int kColumns;              // of a tile
//     constexpr int kWidth;                // columns of the values that it is
//     constexpr int kParts;                // of its work
//     constexpr std::uint32_t kShared;     // bytes of shared memory that it has
//     constexpr int kMostStages;           // of the ring: shared memory takes room from the L1 cache, which holds a
//                                          // line for each load of the EpilogueOp on its way
//     static bool idle(arguments);         // whether nothing is to be done: the same in all threads
//     EpilogueOp(arguments, shared);
//     float scale(float sum);              // before it is rounded
//     void expect(place);                  // where the next tile is, before work on the one kept last; outside: none
//     void work(place, units, part);       // on the one kept last, which may be outside
//     void end();                          // by all consumer threads

#include "products/own/gemm_wgmma.cuh"

namespace quern::cuda::gemm {

/// Where a thread's units, of eight neighbours of a row, are: of rows `row` and `row` + `second`; of the 32 columns of
/// a tile from 32 g on those from 32 g + column on. Unit 2 g is of the first row.
struct UnitPlace {
  static constexpr int kColumns = 32;  ///< of four lanes

  int row, column;
  int second;  ///< 8, or 1 where rows are paired
  /// The consumer's.
  __device__ __forceinline__ int first_row() const { return row / kHalfRows * kHalfRows; }
  __device__ __forceinline__ int rows_on(int unit) const { return unit % 2 * second; }
  static __device__ __forceinline__ int columns_on(int unit) { return kColumns * (unit / 2); }
};

static_assert(UnitPlace::kColumns == kDealtRows, "dealt sums are units");

/// Writes a unit's values to a multiple of their size, where `inside`, and without a branch: a branch would
/// separate the code of one unit from the next one's. The kernel reads nothing that it writes so.
__device__ __forceinline__ void store_unit(void* to, const Pack<bf16>& values, bool inside) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
               "r"(values.word[0]), "r"(values.word[1]), "r"(values.word[2]), "r"(values.word[3]),
               "r"(static_cast<std::uint32_t>(inside)));
}
__device__ __forceinline__ void store_unit(void* to, uint2 codes, bool inside) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(to),
               "r"(codes.x), "r"(codes.y), "r"(static_cast<std::uint32_t>(inside)));
}

/// Four lanes give each other words: lane l has of lane j's the l-th at place j.
__device__ __forceinline__ void exchange(Pack<bf16>& pack) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (static_cast<int>(threadIdx.x) & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      std::uint32_t &low = pack.word[i], &high = pack.word[i | bit];
      const std::uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, bit);
      (upper ? low : high) = other;
    }
  }
}

/// A tile's accumulators. Where the second operand is not dealt, a thread has two neighbours of each of four groups of
/// columns, which four lanes exchange.
template <bool kDealt, int kCount>
struct Units {
  Pack<bf16> kept[kCount] = {};

  __device__ __forceinline__ Pack<bf16> at(int unit) const {
    Pack<bf16> pack = kept[unit];
    if constexpr (!kDealt) exchange(pack);
    return pack;
  }
};

template <class EpilogueOp, class Mainloop>
class OverlappedEpilogue {
  static constexpr Columns kLayoutB = Mainloop::kLayoutB;
  static_assert(kLayoutB != Columns::mn_major || EpilogueOp::kColumns % wgmma::kColumns == 0);

 public:
  using Memory = Shared<EpilogueOp::kColumns, EpilogueOp::kShared, EpilogueOp::kColumns,
                        beside_bytes<Mainloop>(EpilogueOp::kColumns), EpilogueOp::kMostStages>;
  using Arguments = typename EpilogueOp::Arguments;
  static constexpr int kWidth = EpilogueOp::kWidth, kParts = EpilogueOp::kParts;
  static __device__ bool idle(const Arguments& arguments) { return EpilogueOp::idle(arguments); }

  __device__ OverlappedEpilogue(const Arguments& arguments, const Memory& memory, int consumer)
      : consumer_(consumer), epilogue_(arguments, memory.results()) {}

  __device__ __forceinline__ void expect(const WorkTile& item) { epilogue_.expect(place_of(item)); }
  __device__ __forceinline__ void expect_none() { epilogue_.expect(outside()); }
  __device__ __forceinline__ void keep(const WorkTile& item, const float (&sums)[Memory::kColumns / 2]) {
    place_ = place_of(item);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = unit / 2 * 16 + i * 4 + unit % 2 * 2;
        units_.kept[unit].word[i] = wgmma::round_pair(epilogue_.scale(sums[at]), epilogue_.scale(sums[at + 1]));
      }
    }
  }
  __device__ __forceinline__ void work(int part) { epilogue_.work(place_, units_, part); }
  __device__ void end() { epilogue_.end(); }

 private:
  static constexpr int kUnits = EpilogueOp::kColumns / 16;
  static constexpr bool kPaired = Mainloop::kLayoutA == Rows::paired;
  static __device__ __forceinline__ UnitPlace outside() { return {1 << 30, 0, kPaired ? 1 : 8}; }

  __device__ __forceinline__ UnitPlace place_of(const WorkTile& item) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return {item.row(consumer_) + warp_row() + lane / 4 * (kPaired ? 2 : 1), item.column * kWidth + lane % 4 * 8,
            kPaired ? 1 : 8};
  }

  int consumer_;
  Units<kLayoutB == Columns::dealt, kUnits> units_;
  UnitPlace place_ = outside();  // before the first tile
  EpilogueOp epilogue_;
};

}  // namespace quern::cuda::gemm
