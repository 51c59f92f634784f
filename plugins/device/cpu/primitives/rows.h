#pragma once
// Kernels compute in fp32, row by row; rows are read from and rounded to whatever dtype a view has here, so that no
// kernel repeats a ladder of dtypes. fp32 rows are used in place, without a copy.

#include <cstdint>

#include "quern/view.h"

namespace quern::cpu {

/// Elements [begin, begin + count) as floats: a pointer into the view when it is f32, else `scratch`, filled.
const float* load(const View& view, std::int64_t begin, std::int64_t count, float* scratch);
/// Where to compute elements that `store` then rounds: the view itself when it is f32, else `scratch`.
float* target(const View& view, std::int64_t begin, float* scratch);
/// Rounds `values` to the view's dtype; does nothing when `values` is already the place itself.
void store(const View& view, std::int64_t begin, std::int64_t count, const float* values);
/// view += values in fp32, rounded once (accumulating gradients).
void accumulate(const View& view, std::int64_t begin, std::int64_t count, const float* values);

inline const float* load_row(const View& view, std::int64_t row, float* scratch) {
  return load(view, row * view.columns(), view.columns(), scratch);
}
inline float* target_row(const View& view, std::int64_t row, float* scratch) {
  return target(view, row * view.columns(), scratch);
}
inline void store_row(const View& view, std::int64_t row, const float* values) {
  store(view, row * view.columns(), view.columns(), values);
}

/// values[i] rounded to `dtype`'s grid, in place: what a value between two fused ops goes through.
void round_in_place(DType dtype, float* values, std::int64_t count);

/// Per-thread scratch that grows and is kept: `slot` numbers distinct buffers of one kernel.
float* scratch(int slot, std::int64_t count);

}  // namespace quern::cpu
