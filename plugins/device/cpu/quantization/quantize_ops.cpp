// quantize and its kin: x (N, C) to an 8-bit format, row by row and transposed. Scales are format_scale's; the
// protocol of delayed scales is ScaleState's (step_state.h).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "primitives/rows.h"
#include "primitives/simd.h"
#include "quern/error.h"
#include "quern/numeric.h"
#include "quern/quantized_format.h"
#include "quern/random.h"
#include "quern/step_state.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"

namespace quern::cpu {

namespace {

constexpr std::int64_t kChunk = 4096;  // elements that a thread takes at a time

/// What a line is brought to.
struct LineFormat {
  explicit LineFormat(const OpInstance& op)
      : format{{}, op.outputs[0].dtype, largest_of(op.outputs[0].dtype)},
        stochastic(op.attributes.integer_or("stochastic", 0) != 0) {
    if (op.attributes.has("format")) format = *quantized_format_named(op.attributes.word("format"));
  }
  float scale(float amax) const { return format_scale(amax, format); }

  QuantizedFormat format;
  bool stochastic;
};

/// A NaN takes no part, since the format has a NaN; i8 has none, and there it makes the amax infinite and with
/// it the scale NaN.
QUERN_CPU_CLONES float largest_magnitude(const float* x, std::int64_t count, DType format) {
  const float of_nan = format == DType::i8 ? std::numeric_limits<float>::infinity() : 0.0f;
  float amax = 0;
#pragma omp simd reduction(max : amax)
  for (std::int64_t i = 0; i < count; ++i) {
    float magnitude = x[i] == x[i] ? __builtin_fabsf(x[i]) : of_nan;
    amax = magnitude > amax ? magnitude : amax;
  }
  return amax;
}

QUERN_CPU_CLONES void multiply_by(const float* x, std::int64_t count, float factor, float* y) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] * factor;
}

/// Makes the quotients `y` of a line the integers that are drawn for them, by the values and their places in the line.
QUERN_CPU_CLONES void draw_integers(const float* x, std::int64_t count, float inverse, float largest, float* y) {
  const auto scale = __builtin_bit_cast(std::uint32_t, inverse);
  for (std::int64_t i = 0; i < count; ++i) {
    const float drawn = to_integer_stochastic(
        y[i], content_word(__builtin_bit_cast(std::uint32_t, x[i]), scale, static_cast<std::uint32_t>(i)));
    y[i] = drawn > largest ? largest : drawn < -largest ? -largest : drawn;
  }
}

/// A line of x by its scale, not yet brought to the format; under stochastic rounding, to integers already.
void scale_line(const float* x, std::int64_t count, float scale, const LineFormat& to, float* y) {
  multiply_by(x, count, 1.0f / scale, y);
  if (to.stochastic) draw_integers(x, count, 1.0f / scale, to.format.largest, y);
}

/// Calls visit(first element, count) for pieces of `count` elements, over all threads.
template <class Visit>
void for_chunks(std::int64_t count, Visit visit) {
  const std::int64_t chunks = (count + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < chunks; ++i) visit(i * kChunk, std::min(kChunk, count - i * kChunk));
}

float amax_of(const View& x, DType format) {
  const std::int64_t count = x.count(), chunks = (count + kChunk - 1) / kChunk;
  float amax = 0;
#pragma omp parallel for schedule(static) reduction(max : amax)
  for (std::int64_t i = 0; i < chunks; ++i) {
    std::int64_t begin = i * kChunk, part = std::min(kChunk, count - begin);
    amax = std::max(amax, largest_magnitude(load(x, begin, part, scratch(0, kChunk)), part, format));
  }
  return amax;
}

/// x * (1 / scale) for the elements from `begin`, not yet brought to the format: exact but for i8.
float* quotients(const View& x, std::int64_t begin, std::int64_t count, float scale) {
  float* result = scratch(1, kChunk);
  multiply_by(load(x, begin, count, scratch(0, kChunk)), count, 1.0f / scale, result);
  return result;
}

void transpose_codes(const std::uint8_t* q, std::uint8_t* t, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kTile = 64;
  const std::int64_t row_tiles = (rows + kTile - 1) / kTile, column_tiles = (columns + kTile - 1) / kTile;
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t j = 0; j < column_tiles; ++j)
    for (std::int64_t i = 0; i < row_tiles; ++i)
      for (std::int64_t c = j * kTile; c < std::min(columns, (j + 1) * kTile); ++c)
        for (std::int64_t r = i * kTile; r < std::min(rows, (i + 1) * kTile); ++r) t[c * rows + r] = q[r * columns + c];
}

struct Codes {
  View q, t;  ///< either may be absent
};

/// `spare` holds the row-major values when only the transposed ones are asked for.
void write_codes(const View& x, float scale, const Codes& codes, void* spare) {
  View q = codes.q;
  if (!q) {
    if (!codes.t) return;
    q = {spare, codes.t.dtype, x.extents};
  }
  for_chunks(x.count(), [&](std::int64_t begin, std::int64_t count) {
    store(q, begin, count, quotients(x, begin, count, scale));
  });
  if (codes.t) transpose_codes(q.as<std::uint8_t>(), codes.t.as<std::uint8_t>(), x.extents[0], x.extents[1]);
}

/// The scale of this launch, after taking note of x's amax.
float delayed_scale(ScaleState& state, float amax, DType format, std::int64_t margin) {
  state.assumed = state.scale;
  if (!std::isfinite(amax)) return format_scale(amax, format);
  if (amax > state.scale * largest_of(format)) {
    state.scale = std::ldexp(format_scale(amax, format), static_cast<int>(margin));
    ++state.redone;
  }
  state.amax = std::max(state.amax, amax);
  return state.scale == 0 ? 1.0f : state.scale;
}

/// Format of the quantized values; absent outputs do not say.
DType format_of(const OpInstance& op) {
  return dtype_named(op.attributes.has("format") ? op.attributes.word("format") : "").value_or(DType::f32);
}

Launch prepare_current(const OpInstance& op) {
  const DType format = format_of(op);
  return [format](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    float scale = format_scale(amax_of(in[0], format), format);
    *out[1].as<float>() = scale;
    write_codes(in[0], scale, {out[0], out[2]}, exec.workspace);
  };
}

Launch prepare_of_amax(const OpInstance& op) {
  const DType format = format_of(op);
  return [format](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const float scale = format_scale(*in[1].as<float>(), format);
    *out[1].as<float>() = scale;
    write_codes(in[0], scale, {out[0], out[2]}, exec.workspace);
  };
}

// x (any), n tensors -> amaxes (n) f32
Launch prepare_amax(const OpInstance& op) {
  const DType format = format_of(op);
  return [format](std::span<const View> in, std::span<const View> out, const Exec&) {
    for (std::size_t i = 0; i < in.size(); ++i) out[0].as<float>()[i] = amax_of(in[i], format);
  };
}

Launch prepare_delayed(const OpInstance& op) {
  const DType format = format_of(op);
  const std::int64_t margin = op.attributes.integer_or("margin", 0);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    auto& state = *in[1].as<ScaleState>();
    const float scale = delayed_scale(state, amax_of(in[0], format), format, margin);
    *out[1].as<float>() = scale;
    write_codes(in[0], scale, {out[0], out[2]}, exec.workspace);
  };
}

Launch prepare_by(const OpInstance&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    write_codes(in[0], *in[1].as<float>(), {out[0], out[1]}, exec.workspace);
  };
}

Launch prepare_rows(const OpInstance& op) {
  return [to = LineFormat(op)](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &q = out[0];
    const std::int64_t rows = x.extents[0], columns = x.extents[1];
#pragma omp parallel for schedule(static)
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* values = load_row(x, row, scratch(0, columns));
      float* codes = scratch(1, columns);
      const float scale = to.scale(largest_magnitude(values, columns, to.format.dtype));
      if (out[1]) out[1].as<float>()[row] = scale;
      if (!q) continue;
      scale_line(values, columns, scale, to, codes);
      store_row(q, row, codes);
    }
  };
}

Launch prepare_columns(const OpInstance& op) {
  return [to = LineFormat(op)](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &t = out[0];
    const std::int64_t rows = x.extents[0], columns = x.extents[1];
#pragma omp parallel for schedule(static)
    for (std::int64_t column = 0; column < columns; ++column) {
      float *values = scratch(0, rows), *codes = scratch(1, rows);
      float value = 0;
      for (std::int64_t row = 0; row < rows; ++row) values[row] = *load(x, row * columns + column, 1, &value);
      const float scale = to.scale(largest_magnitude(values, rows, to.format.dtype));
      if (out[1]) out[1].as<float>()[column] = scale;
      if (!t) continue;
      scale_line(values, rows, scale, to, codes);
      store_row(t, column, codes);
    }
  };
}

Launch prepare_advance(const OpInstance& op) {
  const std::int64_t history = op.attributes.integer("history"), margin = op.attributes.integer_or("margin", 0);
  const DType format = *dtype_named(op.attributes.word("format"));
  return [=](std::span<const View>, std::span<const View> out, const Exec&) {
    auto& state = *out[0].as<ScaleState>();
    float* past = out[0].as<float>() + kScaleStateWords;
    std::copy_backward(past, past + history - 1, past + history);
    past[0] = state.amax;
    state.filled = static_cast<std::uint32_t>(std::min<std::int64_t>(state.filled + 1, history));
    float amax = *std::max_element(past, past + state.filled);
    ScaleState next{.scale = state.scale, .filled = state.filled};
    if (amax > 0) next.scale = std::ldexp(format_scale(amax, format), static_cast<int>(margin));
    state = next;
  };
}

// ---- supported forms ----

const operands::Dtypes& plain() {
  static const operands::Dtypes dtypes({DType::f32, DType::bf16}, "f32 or bf16");
  return dtypes;
}
const operands::Dtypes& low() {
  static const operands::Dtypes dtypes({DType::e4m3, DType::e5m2, DType::i8}, "e4m3, e5m2 or i8");
  return dtypes;
}

void check_format(OperandCheck& check, const OpInstance& op) {
  check.that(std::ranges::count(low().any, format_of(op)) > 0,
             "needs a format of " + low().name + ", found " + std::string(name_of(format_of(op))));
}

/// x (N, C), and its quantized values as outputs `q` (N, C) and `t` (C, N).
void check_codes(OperandCheck& check, const OpInstance& op, std::size_t q, std::size_t t) {
  const Matrix x = matrix_of(op, 0);
  check.input(0, "x", {x.rows, x.columns}, plain());
  check_format(check, op);
  check.output(q, "q", {x.rows, x.columns}, format_of(op)).output(t, "t", {x.columns, x.rows}, format_of(op));
}

/// Values that are only wanted transposed are made in the workspace first.
OpSupport support_of_codes(const OperandCheck& check, const OpInstance& op, std::size_t q, std::size_t t) {
  const bool spare = check.ok() && op.outputs[t].present && !op.outputs[q].present;
  return check.support(spare ? static_cast<std::size_t>(op.inputs[0].count()) : 0);
}

OpSupport query_scaled(const OpInstance& op) {
  const bool delayed = op.kind == "quantize_delayed", given = op.kind == "quantize_amax";
  OperandCheck check(op, delayed || given ? 2 : 1, 3);
  check_codes(check, op, 0, 2);
  if (given) check.input(1, "amax", {1}, DType::f32);
  if (delayed) {
    check.input(1, "state", {kScaleStateWords + op.attributes.integer("history")}, DType::f32);
    check.that(format_of(op) != DType::i8, "needs a format of e4m3 or e5m2");
  }
  if (check.ok()) check.that(op.outputs[1].present, "operand scale: absent").output(1, "scale", {1}, DType::f32);
  return support_of_codes(check, op, 0, 2);
}

OpSupport query_amax(const OpInstance& op) {
  OperandCheck check(op, std::max<std::size_t>(op.inputs.size(), 1), 1);
  for (std::size_t i = 0; i < op.inputs.size(); ++i) check.input(i, "x", extents_of(op, i), plain());
  check_format(check, op);
  return check.output(0, "amax", {static_cast<std::int64_t>(op.inputs.size())}, DType::f32).support();
}

OpSupport query_by(const OpInstance& op) {
  OperandCheck check(op, 2, 2);
  check_codes(check, op, 0, 1);
  if (check.ok()) check.that(op.inputs[1].count() == 1, "operand scale: needs one element");
  return support_of_codes(check, op, 0, 1);
}

void check_line_format(OperandCheck& check, const OpInstance& op) {
  if (!op.attributes.has("format")) return;
  const QuantizedFormat* format = quantized_format_named(op.attributes.word("format"));
  check.that(format && format->dtype == op.outputs[0].dtype, "needs a format of its output's dtype");
}

OpSupport query_rows(const OpInstance& op) {
  OperandCheck check(op, 1, 2);
  const Matrix x = matrix_of(op, 0);
  check.input(0, "x", {x.rows, x.columns}).output(0, "q", {x.rows, x.columns}, low());
  check_line_format(check, op);
  return check.output(1, "scale", {x.rows}, DType::f32).support();
}

OpSupport query_columns(const OpInstance& op) {
  OperandCheck check(op, 1, 2);
  const Matrix x = matrix_of(op, 0);
  check.input(0, "x", {x.rows, x.columns}).output(0, "t", {x.columns, x.rows}, low());
  check_line_format(check, op);
  return check.output(1, "scale", {x.columns}, DType::f32).support();
}

OpSupport query_advance(const OpInstance& op) {
  const Extents state{kScaleStateWords + op.attributes.integer("history")};
  OperandCheck check(op, 1, 1);
  return check.input(0, "state", state, DType::f32).output(0, "state", state, DType::f32).support();
}

}  // namespace

void add_quantize_ops(OpTable& table) {
  table["quantize"] = {prepare_current, query_scaled};
  table["quantize_amax"] = {prepare_of_amax, query_scaled};
  table["amax"] = {prepare_amax, query_amax};
  table["quantize_delayed"] = {prepare_delayed, query_scaled};
  table["quantize_by"] = {prepare_by, query_by};
  table["quantize_rows"] = {prepare_rows, query_rows};
  table["quantize_columns"] = {prepare_columns, query_columns};
  table["advance_scale"] = {prepare_advance, query_advance};
  add_observe_op(table);
  add_weight_ops(table);
}

}  // namespace quern::cpu
