#include "products/library/matmul_bias.h"

#include <algorithm>

#include "primitives/element.cuh"
#include "runtime/check.h"

namespace quern::cuda {

namespace {

template <class Y, class B>
__global__ void start_rows_kernel(Y* __restrict__ y, const B* __restrict__ bias, std::int64_t rows,
                                  std::int64_t columns, bool add) {
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (std::int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
      Y& out = y[row * columns + column];
      float value = to_float(bias[column]);
      out = from_float<Y>(add ? to_float(out) + value : value);
    }
  }
}

}  // namespace

void start_rows(const View& y, const View& bias, RowStart start, cudaStream_t stream) {
  const std::int64_t rows = y.rows(), columns = y.columns();
  if (rows == 0 || columns == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(rows, 65535));
  with_element(y.dtype, [&](auto out) {
    with_element(bias.dtype, [&](auto in) {
      start_rows_kernel<<<blocks, 256, 0, stream>>>(y.as<decltype(out)>(), bias.as<decltype(in)>(), rows, columns,
                                                    start == RowStart::add);
    });
  });
  QUERN_CUDA(cudaGetLastError());
}

}  // namespace quern::cuda
