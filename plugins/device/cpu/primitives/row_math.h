#pragma once
// The arithmetic of one row, in fp32, its sums in fp64. A fused kernel and the ops it replaces call the same function
// here, which is why they give the same bits. Outputs may be an input's own memory; no function reads an element after
// writing it.

#include <cstdint>

#include "primitives/rows.h"
#include "quern/view.h"

namespace quern::cpu {

/// y = a + b
void add_rows(const float* a, const float* b, std::int64_t count, float* y);
/// sums += x, and y = sums: of sums over many rows.
void add_to_sums(const float* x, std::int64_t count, double* sums);
void round_sums(const double* sums, std::int64_t count, float* y);

/// 1 / sqrt(mean(x^2) + eps). Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019).
float rms_rstd(const float* x, std::int64_t columns, float eps);
/// y = x * rstd * weight
void rms_scale(const float* x, float rstd, const float* weight, std::int64_t columns, float* y);
/// With n = x * rstd and g = dy * weight: dx = rstd * (g - n * mean(g * n)), dweight += dy * n (null: not wanted).
void rms_grad(const float* dy, const float* x, const float* weight, float rstd, std::int64_t columns, float* dx,
              float* dweight);

/// RMS norm of every head of a row of `heads` heads; one rstd each.
void head_norm(const float* x, const float* weight, std::int64_t heads, std::int64_t head_dim, float eps, float* y,
               float* rstd);

struct LayerStatistics {
  float mean, rstd;
};
/// Mean, and 1 / sqrt(variance + eps) from a second pass. Ba et al., "Layer Normalization" (2016).
LayerStatistics layer_statistics(const float* x, std::int64_t columns, float eps);
/// y = (x - mean) * rstd * weight + bias
void layer_scale(const float* x, LayerStatistics s, const float* weight, const float* bias, std::int64_t columns,
                 float* y);
/// With n = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - n * mean(g * n)), dweight += dy * n,
/// dbias += dy (null: not wanted).
void layer_grad(const float* dy, const float* x, const float* weight, LayerStatistics s, std::int64_t columns,
                float* dx, float* dweight, float* dbias);

/// Rotates each of `heads` heads, half-split: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin; cos, sin (head_dim / 2).
void rotate_heads(const float* x, const float* cos, const float* sin, std::int64_t heads, std::int64_t head_dim,
                  float* y);

/// Where to compute a row of an output that may be unread: in place, or in `scratch`.
inline float* place_row(const View& output, std::int64_t row, float* scratch) {
  return output ? target_row(output, row, scratch) : scratch;
}
/// Rounds a row to its declared dtype and keeps it if the output is read. `values` then holds the rounded row, for the
/// next part of a fused kernel.
inline void finish_row(const View& output, DType dtype, std::int64_t row, std::int64_t columns, float* values) {
  round_in_place(dtype, values, columns);
  if (output) store_row(output, row, values);
}

}  // namespace quern::cpu
