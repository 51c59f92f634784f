#pragma once
// The one GEMM that kernels call; blas.cpp says which library does it.

#include <cstdint>
#include <string>

namespace quern::cpu {

/// A row-major fp32 matrix in memory, read as stored or transposed.
struct MatrixView {
  const float* data;
  std::int64_t stride;  ///< elements from one stored row to the next
  enum class Read : std::uint8_t { plain, transposed } read = Read::plain;
};

/// c (m, n) = alpha a (m, k) b (k, n) + beta c, sums in fp32; c is not read when beta is 0. By all threads, in tiles
/// that the sizes alone fix, so that the number of threads changes no bit.
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const MatrixView& a, const MatrixView& b,
          float beta, float* c, std::int64_t c_stride);
/// The same by the calling thread alone: for one among others in a parallel region.
void gemm_here(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const MatrixView& a, const MatrixView& b,
               float beta, float* c, std::int64_t c_stride);

inline constexpr int kMostThreads = 128;             ///< that may be in the library at once
inline constexpr std::size_t kBlasBuffer = 1 << 27;  ///< address space that it takes for each of them (OpenBLAS)

/// Loads the library, if need be, and has it take all memory that `threads` threads will need: where the system later
/// refuses it any, OpenBLAS asks again without end. A library that is not there is a resources error.
void load_blas(int threads);
/// The library and kernel, on which the bits of GEMMs depend: "OpenBLAS 0.3.21, SkylakeX".
std::string blas_name();
/// That the kernel in use is below what the CPU can run, with the fix; empty: it is not.
std::string blas_warning();

}  // namespace quern::cpu
