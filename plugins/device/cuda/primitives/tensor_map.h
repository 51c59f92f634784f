#pragma once
// Descriptions of tensors in memory for Hopper's copy engine (TMA), which copies boxes of them into shared memory.

#include <cuda.h>

#include <array>
#include <cstdint>

#include "quern/dtype.h"

namespace quern::cuda {

/// To be called by `prepare`: finds the driver's function. Throws a resources error where the driver is too old.
void find_tensor_map_encoder();

/// A (B, rows, columns) tensor of bf16 or of 8 bits, `sizes` and `box` from columns on. Boxes with rows of 128 bytes
/// have the 128-byte swizzle, those with shorter ones none; what a box covers beyond the tensor is read as zeros. Rows
/// are contiguous, or `stride` elements apart. Made on the host, without the driver's linkage. Throws where data or
/// rows are not multiples of 16 bytes.
CUtensorMap tensor_map(DType type, const std::array<std::int64_t, 3>& sizes, const void* data,
                       const std::array<std::uint32_t, 3>& box, std::int64_t stride = 0);

}  // namespace quern::cuda
