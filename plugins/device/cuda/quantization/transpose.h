#pragma once
// Transposition of matrices of any element size; 8-bit values by tiles in shared memory at the rate of memory.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/kernels.h"

namespace quern::cuda {

void add_transpose_op(OpTable& table);

/// To be called by `prepare`.
void load_transpose_bytes();
/// to (columns, rows) = transpose of from (rows, columns), both of bytes. Ordered on `stream`.
void transpose_bytes(const std::uint8_t* from, std::uint8_t* to, std::int64_t rows, std::int64_t columns,
                     cudaStream_t stream);

}  // namespace quern::cuda
