#include "row_math.h"

#include <cmath>

#include "simd.h"

namespace quern::cpu {

// `omp simd` without a reduction says that elements are independent, which also holds when output and input coincide.

QUERN_CPU_CLONES void add_rows(const float* a, const float* b, std::int64_t count, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = a[i] + b[i];
}

QUERN_CPU_CLONES float rms_rstd(const float* x, std::int64_t columns, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < columns; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / static_cast<float>(columns) + eps);
}

QUERN_CPU_CLONES void rms_scale(const float* x, float rstd, const float* weight, std::int64_t columns, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < columns; ++i) y[i] = x[i] * rstd * weight[i];
}

QUERN_CPU_CLONES void rms_grad(const float* dy, const float* x, const float* weight, float rstd, std::int64_t columns,
                               float* dx, float* dweight) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < columns; ++i) sum += dy[i] * weight[i] * x[i];
  if (dweight) {
#pragma omp simd
    for (std::int64_t i = 0; i < columns; ++i) dweight[i] += dy[i] * (x[i] * rstd);
  }
  float projection = rstd * sum / static_cast<float>(columns);  // mean(g * n)
#pragma omp simd
  for (std::int64_t i = 0; i < columns; ++i) dx[i] = rstd * (dy[i] * weight[i] - x[i] * rstd * projection);
}

QUERN_CPU_CLONES void head_norm(const float* x, const float* weight, std::int64_t heads, std::int64_t head_dim,
                                float eps, float* y, float* rstd) {
  for (std::int64_t head = 0; head < heads; ++head, x += head_dim, y += head_dim) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < head_dim; ++i) sum += x[i] * x[i];
    float scale = 1.0f / std::sqrt(sum / static_cast<float>(head_dim) + eps);
    rstd[head] = scale;
#pragma omp simd
    for (std::int64_t i = 0; i < head_dim; ++i) y[i] = x[i] * scale * weight[i];
  }
}

QUERN_CPU_CLONES LayerStatistics layer_statistics(const float* x, std::int64_t columns, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < columns; ++i) sum += x[i];
  float mean = sum / static_cast<float>(columns);
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (std::int64_t i = 0; i < columns; ++i) squares += (x[i] - mean) * (x[i] - mean);
  return {mean, 1.0f / std::sqrt(squares / static_cast<float>(columns) + eps)};
}

QUERN_CPU_CLONES void layer_scale(const float* x, LayerStatistics s, const float* weight, const float* bias,
                                  std::int64_t columns, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < columns; ++i) y[i] = (x[i] - s.mean) * s.rstd * weight[i] + bias[i];
}

QUERN_CPU_CLONES void layer_grad(const float* dy, const float* x, const float* weight, LayerStatistics s,
                                 std::int64_t columns, float* dx, float* dweight, float* dbias) {
  float sum = 0, product = 0;
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
  float mean_g = sum / static_cast<float>(columns), projection = product / static_cast<float>(columns);
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
