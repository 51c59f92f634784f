// transpose, and cast, also of bytes that are scaled first: to the bit what other devices give.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "primitives/rows.h"
#include "primitives/simd.h"
#include "quern/error.h"
#include "quern/numeric.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"

namespace quern::cpu {

namespace {

constexpr std::int64_t kChunk = 4096;  // elements that a thread takes at a time

// ---- transpose ----

/// Tiles keep both the rows read and the rows written in the first-level cache.
template <class T, class U>
void transpose_elements(const T* x, U* y, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kTile = 32;
  const std::int64_t row_tiles = (rows + kTile - 1) / kTile, column_tiles = (columns + kTile - 1) / kTile;
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t j = 0; j < column_tiles; ++j) {
    for (std::int64_t i = 0; i < row_tiles; ++i) {
      std::int64_t row_end = std::min(rows, (i + 1) * kTile), column_end = std::min(columns, (j + 1) * kTile);
      for (std::int64_t c = j * kTile; c < column_end; ++c) {
        for (std::int64_t r = i * kTile; r < row_end; ++r)
          if constexpr (std::is_same_v<T, U>)
            y[c * rows + r] = x[r * columns + c];
          else
            y[c * rows + r] = float_to_bf16(x[r * columns + c]);
      }
    }
  }
}

void transpose(std::span<const View> inputs, std::span<const View> outputs, const Exec&) {
  const View &x = inputs[0], &y = outputs[0];
  const std::int64_t rows = x.extents[0], columns = x.extents[1];
  if (x.dtype != y.dtype) return transpose_elements(x.as<float>(), y.as<std::uint16_t>(), rows, columns);
  switch (size_of(x.dtype)) {
    case 1: return transpose_elements(x.as<std::uint8_t>(), y.as<std::uint8_t>(), rows, columns);
    case 2: return transpose_elements(x.as<std::uint16_t>(), y.as<std::uint16_t>(), rows, columns);
    case 4: return transpose_elements(x.as<std::uint32_t>(), y.as<std::uint32_t>(), rows, columns);
    default: return transpose_elements(x.as<std::uint64_t>(), y.as<std::uint64_t>(), rows, columns);
  }
}

OpSupport query_transpose(const OpInstance& op) {
  OperandCheck check(op, 1, 1);
  const Matrix x = matrix_of(op, 0);
  check.input(0, "x", {x.rows, x.columns});
  if (!check.ok()) return check.support();
  const DType dtype = op.inputs[0].dtype;
  const operands::Dtypes rounded({DType::f32, DType::bf16}, "f32 or bf16");
  return check.output(0, "y", {x.columns, x.rows}, dtype == DType::f32 ? rounded : dtype).support();
}

// ---- cast ----

/// x (N, C) of bytes, scale (R, 2 channels): each of N / R rows has a row of factors and of summands.
void cast_scaled(const View& x, const View& scale, const View& y) {
  const std::int64_t rows = x.rows(), columns = x.columns(), channels = scale.columns() / 2, part = columns / channels;
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto* from = x.as<std::uint8_t>() + row * columns;
    const float* factors = scale.as<float>() + row / (rows / scale.rows()) * 2 * channels;
    float* to = target_row(y, row, scratch(0, columns));
    for (std::int64_t i = 0; i < columns; ++i)
      to[i] = static_cast<float>(from[i]) * factors[i / part] + factors[channels + i / part];
    store_row(y, row, to);
  }
}

void cast(std::span<const View> inputs, std::span<const View> outputs, const Exec&) {
  if (inputs.size() > 1 && inputs[1]) return cast_scaled(inputs[0], inputs[1], outputs[0]);
  const View &x = inputs[0], &y = outputs[0];
  const std::int64_t count = x.count(), chunks = (count + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < chunks; ++i) {
    std::int64_t begin = i * kChunk, part = std::min(kChunk, count - begin);
    store(y, begin, part, load(x, begin, part, target(y, begin, scratch(0, kChunk))));
  }
}

OpSupport query_cast(const OpInstance& op) {
  OperandCheck check(op, op.inputs.size() == 2 ? 2 : 1, 1);
  const bool scaled = op.inputs.size() == 2 && op.inputs[1].present;
  const Extents x = extents_of(op, 0), scale = extents_of(op, 1);
  scaled ? check.input(0, "x", x, DType::u8).input(1, "scale", scale, DType::f32) : check.input(0, "x", x);
  if (!check.ok()) return check.support();
  check.output(0, "y", op.outputs[0].extents);
  if (scaled)
    check.that(x.size() == 2 && scale.size() == 2 && scale[0] > 0 && x[0] % scale[0] == 0 && scale[1] > 0 &&
                   scale[1] % 2 == 0 && x[1] % (scale[1] / 2) == 0,
               "scale does not fit x");
  return check.that(op.inputs[0].count() == op.outputs[0].count(), "x and y differ in size").support();
}

CpuOp op(void (*run)(std::span<const View>, std::span<const View>, const Exec&),
         OpSupport (*query)(const OpInstance&)) {
  return {[run](const OpInstance&) { return Launch(run); }, query};
}

}  // namespace

void add_conversion_ops(OpTable& table) {
  table["transpose"] = op(transpose, query_transpose);
  table["cast"] = op(cast, query_cast);
}

}  // namespace quern::cpu
