#pragma once
// The one matrix product that kernels call; blas.cpp says which library does it.

#include <cstdint>

namespace quern::cpu {

/// A row-major fp32 matrix in memory, read as it lies or transposed.
struct MatrixView {
  const float* data;
  std::int64_t stride;  ///< elements from one stored row to the next
  enum class Read : std::uint8_t { plain, transposed } read = Read::plain;
};

/// c (m, n) = alpha a (m, k) b (k, n) + beta c, sums in fp32; c is not read when beta is 0. Uses all threads, or just
/// the calling one inside a parallel region.
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const MatrixView& a, const MatrixView& b,
          float beta, float* c, std::int64_t c_stride);

}  // namespace quern::cpu
