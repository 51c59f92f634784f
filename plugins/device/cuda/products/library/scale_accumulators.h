#pragma once
// Scales accumulators of i8 matmuls to bf16.

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace quern::cuda {

struct ScaledAccumulators {
  const std::int32_t* of;          ///< (rows, columns)
  const float *scale_a, *scale_b;  ///< of all, or of each row and column; null: 1
  const __nv_bfloat16* bias;       ///< (columns); null: none
  __nv_bfloat16* y;
  std::int64_t columns;
  bool by_row, add;
};

void scale_accumulators(const ScaledAccumulators& sums, std::int64_t rows, cudaStream_t stream);

}  // namespace quern::cuda
