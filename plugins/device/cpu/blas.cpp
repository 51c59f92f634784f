#include "blas.h"

#include <cblas.h>

namespace quern::cpu {

void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const MatrixView& a, const MatrixView& b,
          float beta, float* c, std::int64_t c_stride) {
  if (m == 0 || n == 0) return;
  auto read = [](const MatrixView& x) { return x.read == MatrixView::Read::transposed ? CblasTrans : CblasNoTrans; };
  auto size = [](std::int64_t x) { return static_cast<blasint>(x); };
  cblas_sgemm(CblasRowMajor, read(a), read(b), size(m), size(n), size(k), alpha, a.data, size(a.stride), b.data,
              size(b.stride), beta, c, size(c_stride));
}

}  // namespace quern::cpu
