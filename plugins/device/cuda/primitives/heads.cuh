#pragma once
// Heads of a packed qkv row, (heads + 2 kv_heads) * head_dim: queries, keys, values. A few lanes of a warp share a
// head; each holds one pack of its first half and the pack that many elements into the second half, so that the two
// numbers that a rotation mixes are in one thread. Norm and rotation alone and fused thus see the same sums in the same
// order.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "primitives/divide.cuh"
#include "primitives/vector.cuh"
#include "runtime/kernels.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/rope/rope_rows.h"

namespace quern::cuda {

inline constexpr int kHeadThreads = 256;  ///< of a block

/// How threads are laid over heads.
struct HeadLanes {
  HeadLanes(const PackedHeads& packed, DType type)
      : head_dim(static_cast<int>(packed.head_dim)),
        half((head_dim + 1) / 2),
        row_heads(static_cast<int>(packed.all())) {
    auto element = static_cast<int>(size_of(type));
    while ((16 / element << lane_bits) < half) ++lane_bits;
    whole = head_dim % 2 == 0 && half * element % 16 == 0;
  }
  int head_dim, half, row_heads;
  int lane_bits = 0;   ///< 2^lane_bits lanes share a head: at most 32
  bool whole = false;  ///< both halves hold whole packs

  /// Blocks that cover `units` heads.
  std::int64_t blocks(std::int64_t units) const { return ceil_divide(units << lane_bits, kHeadThreads); }
};

/// Checks that input i is a packed qkv, (N, packed), with heads that fit a warp.
inline void check_packed(OperandCheck& check, const OpInstance& op, std::size_t i, const char* name) {
  operands::check_packed(check, op, i, name);
  if (!check.ok()) return;
  const PackedHeads packed(op.attributes);
  auto bytes = packed.head_dim * static_cast<std::int64_t>(size_of(op.inputs[i].dtype));
  check.that(bytes <= 1024, "on cuda takes heads of up to 1024 bytes, found " + std::to_string(bytes));
  std::int64_t threads = matrix_of(op, i).rows * packed.all() * 32;
  check.that(threads < std::int64_t{1} << 31, "on cuda takes up to 2^26 heads of all tokens");
}

/// Cosines and sines of every position below the op's sequence, (positions, 2, half) fp32 on the device.
struct RopeTable {
  const float* values = nullptr;
  int positions = 0;
};

inline RopeTable make_rope_table(const OpInstance& op, CudaContext& context) {
  const std::int64_t positions = op.geometry.sequence;
  std::vector<float> values(static_cast<std::size_t>(positions) * 2 * op.attributes.list("inverse_frequencies").size());
  rope::make_rows(op, 0, positions, 1, values.data());
  return {static_cast<const float*>(context.constant(values.data(), values.size() * sizeof(float))),
          static_cast<int>(positions)};
}

/// One lane's part of a head.
template <class T>
struct HeadPair {
  Pack<T> first, second;
};

template <Access kAccess, class T>
__device__ __forceinline__ HeadPair<T> load_head(const T* head, int at, int half, int head_dim) {
  return {load_pack<kAccess>(head, at, half), load_pack<kAccess>(head + half, at, head_dim - half)};
}

template <Access kAccess, class T>
__device__ __forceinline__ void store_head(T* head, int at, int half, int head_dim, const HeadPair<T>& pair) {
  store_pack<kAccess>(head, at, half, pair.first);
  store_pack<kAccess>(head + half, at, head_dim - half, pair.second);
}

/// Floats [at, at + kPack) of `count`, zero beyond: the numbers that belong to a pack of T.
template <Access kAccess, class T>
__device__ __forceinline__ Floats<T> load_floats(const float* values, int at, int count) {
  Floats<T> floats;
#pragma unroll
  for (int i = 0; i < kPack<T>; i += 4) {
    const Floats<float> part = unpack(load_pack<kAccess>(values, at + i, count));
#pragma unroll
    for (int j = 0; j < 4; ++j) floats.at[i + j] = part.at[j];
  }
  return floats;
}

/// The half-split rotation of a head by its position: first cos - second sin, second cos + first sin. `sign` -1 turns
/// back. A position outside the table gives NaN, which the step's finite check reports.
template <Access kAccess, class T>
__device__ __forceinline__ HeadPair<T> rotate(const HeadPair<T>& head, const RopeTable& table, int position, float sign,
                                              int at, int half) {
  const bool inside = position >= 0 && position < table.positions;
  const float* cosines = table.values + std::int64_t{inside ? position : 0} * 2 * half;
  const Floats<T> cos = load_floats<kAccess, T>(cosines, at, half),
                  sin = load_floats<kAccess, T>(cosines + half, at, half);
  const Floats<T> x = unpack(head.first), y = unpack(head.second);
  Floats<T> first, second;
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    const float c = inside ? cos.at[i] : __int_as_float(0x7fffffff), s = sign * sin.at[i];
    first.at[i] = x.at[i] * c - y.at[i] * s;
    second.at[i] = y.at[i] * c + x.at[i] * s;
  }
  return {round_pack(first), round_pack(second)};
}

}  // namespace quern::cuda
