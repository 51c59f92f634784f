#pragma once
// Layouts of a quantized matrix's scales: for the ops that write them (quantize, quantize_rows, quantize_blocks),
// the op that reads them (matmul) and the devices. The layouts of blocks of 128 elements are cuBLASLt's on
// Hopper.

#include <cstdint>
#include <optional>
#include <string_view>

#include "quern/shape.h"

namespace quern {

/// Elements along the contracted dimension that share a scale; rows of a tile, too.
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

/// The same for its transpose, whose columns may be tokens. Sizes of values must be linear in the number of tokens, and
/// the number of blocks is not, so there are a few more floats, which are zero: the scales come first,
/// [scale_blocks(rows)][columns].
inline Extents column_block_scales(std::int64_t rows, std::int64_t columns) {
  return {columns + rows * scale_blocks(columns)};
}

/// Layout of the scales of a matrix (rows, columns); attribute `layout` of op observe_scale.
enum class ScaleLayout : std::uint8_t {
  tensor,         ///< one
  rows,           ///< one a row
  columns,        ///< one a column
  row_blocks,     ///< row_block_scales
  column_blocks,  ///< column_block_scales
  squares,        ///< square_scales
};

inline std::optional<ScaleLayout> scale_layout_named(std::string_view name) {
  constexpr std::string_view kNames[] = {"tensor", "rows", "columns", "row_blocks", "column_blocks", "squares"};
  for (std::size_t i = 0; i < std::size(kNames); ++i)
    if (name == kNames[i]) return static_cast<ScaleLayout>(i);
  return {};
}

inline Extents scale_extents(ScaleLayout layout, std::int64_t rows, std::int64_t columns) {
  switch (layout) {
    case ScaleLayout::tensor: return {1};
    case ScaleLayout::rows: return {rows};
    case ScaleLayout::columns: return {columns};
    case ScaleLayout::row_blocks: return row_block_scales(rows, columns);
    case ScaleLayout::column_blocks: return column_block_scales(rows, columns);
    case ScaleLayout::squares: return square_scales(rows, columns);
  }
  return {};
}

/// Index of the scale of element (row, column).
constexpr std::int64_t scale_index(ScaleLayout layout, std::int64_t row, std::int64_t column, std::int64_t rows,
                                   std::int64_t columns) {
  switch (layout) {
    case ScaleLayout::tensor: return 0;
    case ScaleLayout::rows: return row;
    case ScaleLayout::columns: return column;
    case ScaleLayout::row_blocks: return column / kScaleBlock * rows + row;
    case ScaleLayout::column_blocks: return row / kScaleBlock * columns + column;
    case ScaleLayout::squares: return row / kScaleBlock * ((scale_blocks(columns) + 3) / 4 * 4) + column / kScaleBlock;
  }
  return 0;
}

}  // namespace quern
