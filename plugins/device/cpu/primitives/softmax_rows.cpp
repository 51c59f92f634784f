#include "primitives/softmax_rows.h"

#include <cmath>

#include "primitives/simd.h"

namespace quern::cpu {

QUERN_CPU_CLONES float row_maximum(const float* x, std::int64_t count) {
  float largest = x[0];
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

QUERN_CPU_CLONES double exponentiate(float* x, std::int64_t count, float shift) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) {
    float e = fast_exp(x[i] - shift);
    x[i] = e;
    sum += e;
  }
  return sum;
}

QUERN_CPU_CLONES double sum_of_exponentials(const float* x, std::int64_t count, float shift) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) sum += fast_exp(x[i] - shift);
  return sum;
}

QUERN_CPU_CLONES void multiply(const float* x, std::int64_t count, float factor, float* y) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] * factor;
}

void soft_cap(const float* x, std::int64_t count, float cap, float* y) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = cap * std::tanh(x[i] / cap);
}

QUERN_CPU_CLONES void soft_cap_grad(const float* y, std::int64_t count, float cap, float* dx) {
  for (std::int64_t i = 0; i < count; ++i) dx[i] *= 1 - (y[i] / cap) * (y[i] / cap);
}

}  // namespace quern::cpu
