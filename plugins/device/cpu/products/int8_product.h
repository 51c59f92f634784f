#pragma once
// Matmuls of int8 values with exact int32 accumulators.

#include <cstdint>

namespace quern::cpu {

/// Terms that one accumulator may have: 2^17 of at most 127^2 stay below 2^31.
inline constexpr std::int64_t kMostInt8Sums = std::int64_t{1} << 17;

/// A matrix (rows, k) of int8 values, each row of which is summed over.
struct CodeRows {
  const std::int8_t* data;
  std::int64_t row_stride, stride;  ///< elements from one row to the next, and from one element of a row to the next
};

/// Elements of the panel that `rows` of k values are unpacked into.
std::int64_t int8_panel(std::int64_t rows, std::int64_t k);

/// c (m, n) = alpha a b^T, contiguous: each sum exact, then rounded to fp32 and scaled. By all threads. k is at most
/// kMostInt8Sums; panels hold int8_panel elements.
void int8_product(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const CodeRows& a, const CodeRows& b,
                  std::int16_t* panel_a, std::int16_t* panel_b, float* c);

}  // namespace quern::cpu
