#pragma once
// Scales of blocks of 128 elements: where they lie, for the op that makes them (quantize_blocks), the op that reads
// them (matmul with scale_rows_b) and the devices. The layouts are those that cuBLASLt takes on Hopper.

#include <cstdint>

#include "quern/shape.h"

namespace quern {

/// Elements along the contracted dimension that share a scale; in a square block, rows too.
inline constexpr std::int64_t kScaleBlock = 128;

/// Blocks that `elements` fall into; the last one may be short.
constexpr std::int64_t scale_blocks(std::int64_t elements) { return (elements + kScaleBlock - 1) / kScaleBlock; }

/// f32 scales of 128 x 128 blocks of a matrix (rows, columns): one row for each row of blocks, padded with ones to a
/// multiple of four.
inline Extents square_scales(std::int64_t rows, std::int64_t columns) {
  return {scale_blocks(rows), (scale_blocks(columns) + 3) / 4 * 4};
}

/// f32 scales of 1 x 128 blocks of a matrix (rows, columns): scale of block b of row r at [b][r].
inline Extents row_block_scales(std::int64_t rows, std::int64_t columns) { return {scale_blocks(columns), rows}; }

/// The same of its transpose, whose rows run along what may be tokens. A number of blocks is not linear in the tokens,
/// as sizes of values are, so there is room for a few more floats, which are zero: the scales come first,
/// [scale_blocks(rows)][columns].
inline Extents column_block_scales(std::int64_t rows, std::int64_t columns) {
  return {columns + rows * scale_blocks(columns)};
}

}  // namespace quern
