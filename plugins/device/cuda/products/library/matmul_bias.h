#pragma once
// A bias that cuBLASLt's epilogue does not take is written to y first, and the matmul added to it, with the rounding
// of a matmul that is added to a gradient.

#include <cuda_runtime_api.h>

#include "quern/view.h"

namespace quern::cuda {

enum class RowStart { write, add };

/// Every row of y (M, N) f32 or bf16 becomes, or gets added, bias (N) f32 or bf16.
void start_rows(const View& y, const View& bias, RowStart start, cudaStream_t stream);

}  // namespace quern::cuda
