#include "primitives/row_math.h"

#include <cmath>

#include "primitives/simd.h"

namespace quern::cpu {

// `omp simd` without a reduction says that elements are independent, which also holds when output and input coincide.

QUERN_CPU_CLONES void add_rows(const float* a, const float* b, std::int64_t count, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = a[i] + b[i];
}

QUERN_CPU_CLONES void add_to_sums(const float* x, std::int64_t count, double* sums) {
  for (std::int64_t i = 0; i < count; ++i) sums[i] += double{x[i]};
}

QUERN_CPU_CLONES void round_sums(const double* sums, std::int64_t count, float* y) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = static_cast<float>(sums[i]);
}

QUERN_CPU_CLONES float rms_rstd(const float* x, std::int64_t columns, float eps) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < columns; ++i) sum += double{x[i]} * double{x[i]};
  return static_cast<float>(1 / std::sqrt(sum / static_cast<double>(columns) + eps));
}

QUERN_CPU_CLONES void rms_scale(const float* x, float rstd, const float* weight, std::int64_t columns, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < columns; ++i) y[i] = x[i] * rstd * weight[i];
}

QUERN_CPU_CLONES void rms_grad(const float* dy, const float* x, const float* weight, float rstd, std::int64_t columns,
                               float* dx, float* dweight) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < columns; ++i) sum += dy[i] * weight[i] * x[i];
  if (dweight) {
#pragma omp simd
    for (std::int64_t i = 0; i < columns; ++i) dweight[i] += dy[i] * (x[i] * rstd);
  }
  const auto projection = static_cast<float>(rstd * sum / static_cast<double>(columns));  // mean(g * n)
#pragma omp simd
  for (std::int64_t i = 0; i < columns; ++i) dx[i] = rstd * (dy[i] * weight[i] - x[i] * rstd * projection);
}

QUERN_CPU_CLONES void head_norm(const float* x, const float* weight, std::int64_t heads, std::int64_t head_dim,
                                float eps, float* y, float* rstd) {
  for (std::int64_t head = 0; head < heads; ++head, x += head_dim, y += head_dim) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < head_dim; ++i) sum += double{x[i]} * double{x[i]};
    const auto scale = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(head_dim) + eps));
    rstd[head] = scale;
#pragma omp simd
    for (std::int64_t i = 0; i < head_dim; ++i) y[i] = x[i] * scale * weight[i];
  }
}

QUERN_CPU_CLONES LayerStatistics layer_statistics(const float* x, std::int64_t columns, float eps) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < columns; ++i) sum += x[i];
  const auto mean = static_cast<float>(sum / static_cast<double>(columns));
  double squares = 0;
#pragma omp simd reduction(+ : squares)
  for (std::int64_t i = 0; i < columns; ++i) {
    double centred = x[i] - mean;
    squares += centred * centred;
  }
  return {mean, static_cast<float>(1 / std::sqrt(squares / static_cast<double>(columns) + eps))};
}

QUERN_CPU_CLONES void layer_scale(const float* x, LayerStatistics s, const float* weight, const float* bias,
                                  std::int64_t columns, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < columns; ++i) y[i] = (x[i] - s.mean) * s.rstd * weight[i] + bias[i];
}

QUERN_CPU_CLONES void layer_grad(const float* dy, const float* x, const float* weight, LayerStatistics s,
                                 std::int64_t columns, float* dx, float* dweight, float* dbias) {
  double sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
  for (std::int64_t i = 0; i < columns; ++i) {
    float g = dy[i] * weight[i];
    sum += g;
    product += g * ((x[i] - s.mean) * s.rstd);
  }
  if (dweight) {
#pragma omp simd
    for (std::int64_t i = 0; i < columns; ++i) dweight[i] += dy[i] * ((x[i] - s.mean) * s.rstd);
  }
  if (dbias) {
#pragma omp simd
    for (std::int64_t i = 0; i < columns; ++i) dbias[i] += dy[i];
  }
  const auto mean_g = static_cast<float>(sum / static_cast<double>(columns));
  const auto projection = static_cast<float>(product / static_cast<double>(columns));
#pragma omp simd
  for (std::int64_t i = 0; i < columns; ++i) {
    dx[i] = s.rstd * (dy[i] * weight[i] - mean_g - (x[i] - s.mean) * s.rstd * projection);
  }
}

QUERN_CPU_CLONES void rotate_heads(const float* x, const float* cos, const float* sin, std::int64_t heads,
                                   std::int64_t head_dim, float* y) {
  std::int64_t half = head_dim / 2;
  for (std::int64_t head = 0; head < heads; ++head, x += head_dim, y += head_dim) {
#pragma omp simd
    for (std::int64_t i = 0; i < half; ++i) {
      float first = x[i], second = x[i + half];
      y[i] = first * cos[i] - second * sin[i];
      y[i + half] = second * cos[i] + first * sin[i];
    }
  }
}

}  // namespace quern::cpu
