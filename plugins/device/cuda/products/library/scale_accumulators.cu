#include "primitives/element.cuh"
#include "products/library/scale_accumulators.h"
#include "runtime/check.h"

namespace quern::cuda {

namespace {

/// A block a row; columns are a multiple of 4. In the order of own GEMMs (gemm_scaling.cuh): values are rounded
/// before they are added.
__global__ void scale_accumulators_kernel(const ScaledAccumulators s) {
  const std::int64_t row = blockIdx.x;
  auto one = [](const float* scale, std::int64_t at) { return scale != nullptr ? scale[at] : 1.0f; };
  const float of_row = s.by_row ? one(s.scale_a, row) : one(s.scale_a, 0) * one(s.scale_b, 0);
  for (std::int64_t column = 4 * threadIdx.x; column < s.columns; column += 4 * blockDim.x) {
    const int4 sums = *reinterpret_cast<const int4*>(s.of + row * s.columns + column);
    const std::int32_t of[4] = {sums.x, sums.y, sums.z, sums.w};
    bf16* const y = s.y + row * s.columns + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float value = static_cast<float>(of[i]) * of_row;
      if (s.by_row) value *= one(s.scale_b, column + i);
      if (s.bias != nullptr) value += to_float(s.bias[column + i]);
      const bf16 rounded = from_float<bf16>(value);
      y[i] = s.add ? from_float<bf16>(to_float(y[i]) + to_float(rounded)) : rounded;
    }
  }
}

}  // namespace

void scale_accumulators(const ScaledAccumulators& sums, std::int64_t rows, cudaStream_t stream) {
  scale_accumulators_kernel<<<static_cast<unsigned>(rows), 256, 0, stream>>>(sums);
  QUERN_CUDA(cudaGetLastError());
}

}  // namespace quern::cuda
