#pragma once
// SwiGLU, and its gradient, as Epilogues of GEMMs (gemm_overlapped_epilogue.cuh). The use of their values is a
// type:
//
//   To
//     struct Arguments { int rows, width; ... };   // of the gate
//     constexpr std::uint32_t kShared;
//     constexpr Rows kRows;                        // the first operand's layout
//     static bool idle(arguments);
//     To(arguments, shared);
//     float scale(float sum);
//     const bf16* gate_up(arguments);              // for the gradient
//     void swiglu(unit, gate, up, y);              // of a unit, inside or not
//     void gradient(unit, dy, y, dgate, dup);      // y: swiglu again
//     void end();
//     constexpr int kMoreParts;                    // of work on a tile behind its last unit; ByUnit has none
//     void complete();                             // the last unit has come
//     void work(place, part);

#include "elementwise/activations.cuh"
#include "products/own/gemm_launch.cuh"
#include "products/own/gemm_overlapped_epilogue.cuh"

namespace quern::cuda::gemm {

/// A unit among values of `width` columns.
struct ValueUnit {
  UnitPlace place;
  int number;
  int column;
  bool inside;
  __device__ __forceinline__ ValueUnit(const UnitPlace& of, int unit, int rows, int width)
      : place(of),
        number(unit),
        column(of.column + UnitPlace::columns_on(unit)),
        inside(of.row + of.rows_on(unit) < rows && column < width) {}
  /// Its first element where rows are `width` apart: the place's index, and the part that is the same in all threads.
  __device__ __forceinline__ std::int64_t at(std::int64_t width) const {
    return place.row * width + place.column + (place.rows_on(number) * width + UnitPlace::columns_on(number));
  }
};

/// To null: not wanted.
__device__ __forceinline__ void store(bf16* to, std::int64_t at, const Pack<bf16>& values, const ValueUnit& unit) {
  store_unit(to + at, values, unit.inside && to != nullptr);
}

/// Of a To that is done with a unit at once.
struct ByUnit {
  static constexpr int kMoreParts = 0;
  __device__ __forceinline__ void complete() {}
  __device__ __forceinline__ void work(const UnitPlace&, int) {}
};

/// A tile is 128 columns of gate and the same of up. Units are made in kOfParts.
template <class To, int kOfParts>
class SwigluEpilogue {
 public:
  using Arguments = typename To::Arguments;
  static constexpr int kColumns = 256, kWidth = 128, kUnits = 2 * kWidth / UnitPlace::kColumns;
  static constexpr int kMostStages = kAnyStages;
  static constexpr int kParts = kOfParts + To::kMoreParts;
  static constexpr std::uint32_t kShared = To::kShared;
  static constexpr Rows kRows = To::kRows;
  static __device__ bool idle(const Arguments& arguments) { return To::idle(arguments); }

  __device__ SwigluEpilogue(const Arguments& arguments, std::uint32_t shared) : a_(arguments), to_(arguments, shared) {}

  __device__ __forceinline__ float scale(float sum) const { return to_.scale(sum); }
  __device__ __forceinline__ void expect(const UnitPlace&) {}

  template <class Units>
  __device__ __forceinline__ void work(const UnitPlace& place, const Units& units, int part) {
    if (part >= kOfParts) return to_.work(place, part - kOfParts);
#pragma unroll
    for (int number = part * kUnits / kOfParts; number < (part + 1) * kUnits / kOfParts; ++number) {
      const Pack<bf16> gate = units.at(number), up = units.at(kUnits + number);
      const Floats<bf16> g = unpack(gate), u = unpack(up);
      Floats<bf16> y;
#pragma unroll
      for (int i = 0; i < 8; ++i) y.at[i] = cuda::swiglu(g.at[i], u.at[i]);
      to_.swiglu(ValueUnit(place, number, a_.rows, a_.width), gate, up, round_pack(y));
    }
    if (part + 1 == kOfParts) to_.complete();
  }
  __device__ void end() { to_.end(); }

 private:
  const Arguments& a_;
  To to_;
};

inline constexpr int kGradientStages = 4;  ///< of 8 bits: more would take room from the L1 cache

/// Beside a ring of at most kOfStages (gemm_overlapped_epilogue.cuh). A tile is 192 columns of dy, or so many. gate and
/// up are read kAhead parts before they are worked on, a tile's first parts beside the tile before.
template <class To, int kOfParts, int kOfStages = kAnyStages, int kOfColumns = 192>
class SwigluGradEpilogue {
 public:
  using Arguments = typename To::Arguments;
  static constexpr int kColumns = kOfColumns, kWidth = kColumns, kUnits = 2 * kWidth / UnitPlace::kColumns;
  static constexpr int kMostStages = kOfStages;
  static constexpr int kParts = kOfParts + To::kMoreParts;
  static constexpr int kAhead = To::kMoreParts > 0 ? kOfParts - 1 : (kOfParts - 1) / 3;
  static constexpr std::uint32_t kShared = To::kShared;
  static constexpr Rows kRows = To::kRows;
  static __device__ bool idle(const Arguments& arguments) { return To::idle(arguments); }

  __device__ SwigluGradEpilogue(const Arguments& arguments, std::uint32_t shared)
      : a_(arguments), to_(arguments, shared) {}

  __device__ __forceinline__ float scale(float sum) const { return to_.scale(sum); }
  __device__ __forceinline__ void expect(const UnitPlace& place) { next_ = place; }

  template <class Units>
  __device__ __forceinline__ void work(const UnitPlace& place, const Units& units, int part) {
    if (part >= kOfParts) return to_.work(place, part - kOfParts);
    read(part + kAhead < kOfParts ? place : next_, (part + kAhead) % kOfParts);
#pragma unroll
    for (int number = part * kUnits / kOfParts; number < (part + 1) * kUnits / kOfParts; ++number) {
      const Floats<bf16> g = unpack(gates_[number]), u = unpack(ups_[number]);
      const Pack<bf16> dy = units.at(number);
      const Floats<bf16> d = unpack(dy);
      Floats<bf16> y, dgate, dup;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const GateUp slope = swiglu_grad(d.at[i], g.at[i], u.at[i]);
        dgate.at[i] = slope.gate;
        dup.at[i] = slope.up;
        y.at[i] = cuda::swiglu(g.at[i], u.at[i]);
      }
      to_.gradient(ValueUnit(place, number, a_.rows, a_.width), dy, round_pack(y), round_pack(dgate), round_pack(dup));
    }
    if (part + 1 == kOfParts) to_.complete();
  }
  __device__ void end() { to_.end(); }

 private:
  /// What a part works on.
  __device__ __forceinline__ void read(const UnitPlace& place, int part) {
#pragma unroll
    for (int number = part * kUnits / kOfParts; number < (part + 1) * kUnits / kOfParts; ++number) {
      const ValueUnit unit(place, number, a_.rows, a_.width);
      const bf16* from = To::gate_up(a_) + unit.at(2 * a_.width);
      gates_[number] = load_pack<Access::vector>(from, 0, unit.inside ? 1 : 0);
      ups_[number] = load_pack<Access::vector>(from + a_.width, 0, unit.inside ? 1 : 0);
    }
  }

  const Arguments& a_;
  To to_;
  UnitPlace next_;  ///< of the next tile
  Pack<bf16> gates_[kUnits] = {}, ups_[kUnits] = {};
};

template <class Mainloop, class EpilogueOp>
using FusedLaunch = GemmLaunch<Mainloop, OverlappedEpilogue<EpilogueOp, Mainloop>>;

}  // namespace quern::cuda::gemm
