// quantize_blocks, quantize_squares: x (N, C) to an 8-bit format by tiles of 128 x 128, row by row and transposed, with
// scales of format_scale for the 128 elements of a row and of a column of the tile, or for the whole tile.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "primitives/rows.h"
#include "quern/block_scales.h"
#include "quern/numeric.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"

namespace quern::cpu {

namespace {

/// Some lines of a tile, kScaleBlock floats apart.
struct Lines {
  const float* values;
  std::int64_t count, length;
};

float amax_of(const float* values, std::int64_t count) {
  float amax = 0;
  for (std::int64_t i = 0; i < count; ++i)
    if (std::fabs(values[i]) > amax) amax = std::fabs(values[i]);  // false for a NaN
  return amax;
}

/// Quantized values of all lines with one scale, line i from element `begin + i * stride` of `codes`, if present, on.
void write_lines(const Lines& lines, float scale, const View& codes, std::int64_t begin, std::int64_t stride) {
  if (!codes) return;
  float quotients[kScaleBlock];
  const float inverse = 1.0f / scale;
  for (std::int64_t i = 0; i < lines.count; ++i) {
    for (std::int64_t j = 0; j < lines.length; ++j) quotients[j] = lines.values[i * kScaleBlock + j] * inverse;
    store(codes, begin + i * stride, lines.length, quotients);
  }
}

/// The same with a scale for each line; `scales` may be null.
void write_scaled_lines(const Lines& lines, DType format, const View& codes, std::int64_t begin, std::int64_t stride,
                        float* scales) {
  for (std::int64_t i = 0; i < lines.count; ++i) {
    const Lines line{lines.values + i * kScaleBlock, 1, lines.length};
    const float scale = format_scale(amax_of(line.values, line.length), format);
    write_lines(line, scale, codes, begin + i * stride, stride);
    if (scales) scales[i] = scale;
  }
}

/// The scale of block (row, column), and after the last block of a row the ones that pad it.
void write_square_scale(const View& scales, std::int64_t row, std::int64_t column, std::int64_t columns, float scale) {
  if (!scales) return;
  float* line = scales.as<float>() + row * scales.extents[1];
  line[column] = scale;
  if (column + 1 == columns) std::fill(line + columns, line + scales.extents[1], 1.0f);
}

struct Outputs {
  View q, scale, t, t_scale;  ///< each may be absent
};

/// Which values share a scale, and its place.
enum class Blocks {
  lines,
  squares,         ///< square_scales
  spread_squares,  ///< in the place of each line's
};

void quantize_tile(const View& x, const Outputs& out, std::int64_t down, std::int64_t across, Blocks blocks,
                   DType format) {
  const std::int64_t rows = x.extents[0], columns = x.extents[1];
  const std::int64_t row = down * kScaleBlock, column = across * kScaleBlock;
  const std::int64_t height = std::min(kScaleBlock, rows - row), width = std::min(kScaleBlock, columns - column);
  float* values = scratch(0, kScaleBlock * kScaleBlock);
  float* turned = scratch(1, kScaleBlock * kScaleBlock);
  float amax = 0;
  for (std::int64_t r = 0; r < height; ++r) {
    float* line = values + r * kScaleBlock;
    const float* loaded = load(x, (row + r) * columns + column, width, line);
    if (loaded != line) std::copy_n(loaded, width, line);
    for (std::int64_t c = 0; c < width; ++c) turned[c * kScaleBlock + r] = line[c];
    amax = std::max(amax, amax_of(line, width));
  }
  const Lines by_row{values, height, width}, by_column{turned, width, height};
  const std::int64_t at = row * columns + column, turned_at = column * rows + row;
  float* scales = out.scale && blocks != Blocks::squares ? out.scale.as<float>() + across * rows + row : nullptr;
  float* t_scales =
      out.t_scale && blocks != Blocks::squares ? out.t_scale.as<float>() + down * columns + column : nullptr;
  if (blocks != Blocks::lines) {
    const float scale = format_scale(amax, format);
    if (blocks == Blocks::squares) {
      write_square_scale(out.scale, down, across, scale_blocks(columns), scale);
      write_square_scale(out.t_scale, across, down, scale_blocks(rows), scale);
    }
    if (scales) std::fill_n(scales, height, scale);
    if (t_scales) std::fill_n(t_scales, width, scale);
    write_lines(by_row, scale, out.q, at, columns);
    write_lines(by_column, scale, out.t, turned_at, rows);
    return;
  }
  if (out.q || scales) write_scaled_lines(by_row, format, out.q, at, columns, scales);
  if (out.t || t_scales) write_scaled_lines(by_column, format, out.t, turned_at, rows, t_scales);
}

Blocks blocks_of(const OpInstance& op) {
  if (op.kind == "quantize_squares") return Blocks::spread_squares;
  return op.attributes.integer_or("square", 0) == 0 ? Blocks::lines : Blocks::squares;
}

DType format_of(const OpInstance& op) {
  return dtype_named(op.attributes.has("format") ? op.attributes.word("format") : "").value_or(DType::f32);
}

Launch prepare(const OpInstance& op) {
  return [blocks = blocks_of(op), format = format_of(op)](std::span<const View> in, std::span<const View> out,
                                                          const Exec&) {
    const View& x = in[0];
    const std::int64_t down = scale_blocks(x.extents[0]), across = scale_blocks(x.extents[1]);
#pragma omp parallel for schedule(static) collapse(2)
    for (std::int64_t i = 0; i < down; ++i)
      for (std::int64_t j = 0; j < across; ++j)
        quantize_tile(x, {out[0], out[1], out[2], out[3]}, i, j, blocks, format);
    if (blocks != Blocks::squares && out[3])
      std::fill(out[3].as<float>() + down * x.extents[1], out[3].as<float>() + out[3].count(), 0.0f);
  };
}

OpSupport query(const OpInstance& op) {
  OperandCheck check(op, 1, 4);
  const auto [rows, columns] = matrix_of(op, 0);
  const DType format = format_of(op);
  check.input(0, "x", {rows, columns});
  check.that(format == DType::e4m3 || format == DType::e5m2, "needs a format of e4m3 or e5m2");
  check.output(0, "q", {rows, columns}, format).output(2, "t", {columns, rows}, format);
  const bool square = blocks_of(op) == Blocks::squares;
  check.output(1, "scale", square ? square_scales(rows, columns) : row_block_scales(rows, columns), DType::f32);
  check.output(3, "t_scale", square ? square_scales(columns, rows) : column_block_scales(rows, columns), DType::f32);
  return check.support();
}

}  // namespace

void add_quantize_blocks_op(OpTable& table) { table["quantize_blocks"] = table["quantize_squares"] = {prepare, query}; }

}  // namespace quern::cpu
