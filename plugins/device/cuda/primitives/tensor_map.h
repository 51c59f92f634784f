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

inline constexpr int kDealtRows = 32;
/// A (rows, columns) matrix of 8 bits, rows a multiple of 32, in boxes of `box_rows` rows, as many, by 128 columns, or
/// by 64 with the 64-byte swizzle. Of each 32 rows a box has row 8 q + 2 g + e at its row 8 g + 2 q + e (q, g < 4,
/// e < 2). Coordinates are (column, 0, 0, 0, row / 32); the rest is as above.
CUtensorMap dealt_tensor_map(DType type, std::int64_t rows, std::int64_t columns, const void* data, int box_rows,
                             int box_columns = 128);

inline constexpr int kPairedRows = 16;
/// The same of rows a multiple of 16, in boxes of 128 columns. Of each 16 rows a box has row 2 j + i at its row 8 i + j
/// (i < 2). Coordinates are (column, 0, 0, row / 16).
CUtensorMap paired_tensor_map(DType type, std::int64_t rows, std::int64_t columns, const void* data, int box_rows);

}  // namespace quern::cuda
