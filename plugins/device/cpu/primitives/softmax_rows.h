#pragma once
// The row passes of a softmax, shared by attention and the loss.

#include <cstdint>

namespace quern::cpu {

/// Largest of `count` > 0 elements.
float row_maximum(const float* x, std::int64_t count);
/// x = exp(x - shift) in place; returns the sum. Sums are fp64: beside a probability near 1, a running fp32 sum would
/// drop those below 2^-24, which together may be the whole loss.
double exponentiate(float* x, std::int64_t count, float shift);
/// Sum of exp(x - shift).
double sum_of_exponentials(const float* x, std::int64_t count, float shift);
/// y = factor x; y may be x.
void multiply(const float* x, std::int64_t count, float factor, float* y);

/// y = cap tanh(x / cap)
void soft_cap(const float* x, std::int64_t count, float cap, float* y);
/// dx *= 1 - (y / cap)^2: the slope of soft_cap where it gives y.
void soft_cap_grad(const float* y, std::int64_t count, float cap, float* dx);

}  // namespace quern::cpu
