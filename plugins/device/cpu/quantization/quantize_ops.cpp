// quantize and its kin: x (N, C) to an 8-bit format, row by row and transposed. Scales are those of format_scale; the
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
#include "quern/step_state.h"
#include "runtime/kernels.h"
#include "runtime/support.h"

namespace quern::cpu {

namespace {

constexpr std::int64_t kChunk = 4096;  // elements that a thread takes at a time

/// A NaN takes no part, since its code tells of it; i8 has no such code, and there it makes the amax infinite and with
/// that the scale NaN.
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

QUERN_CPU_CLONES void divide_by(const float* x, std::int64_t count, float divisor, float* y) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] / divisor;
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

/// x / scale for the elements from `begin`, not yet rounded. Powers of two are exact either way; i8's scale is none.
float* quotients(const View& x, std::int64_t begin, std::int64_t count, float scale, DType format) {
  float* result = scratch(1, kChunk);
  const float* values = load(x, begin, count, scratch(0, kChunk));
  if (format == DType::i8)
    divide_by(values, count, scale, result);
  else
    multiply_by(values, count, 1.0f / scale, result);
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

/// `spare` holds the row-major codes when only the transposed ones are asked for.
void write_codes(const View& x, float scale, const Codes& codes, void* spare) {
  View q = codes.q;
  if (!q) {
    if (!codes.t) return;
    q = {spare, codes.t.dtype, x.extents};
  }
  for_chunks(x.count(), [&](std::int64_t begin, std::int64_t count) {
    store(q, begin, count, quotients(x, begin, count, scale, q.dtype));
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

/// Of the codes; outputs that nobody reads do not say.
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
  return [format = op.outputs[0].dtype](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &q = out[0];
    const std::int64_t rows = x.extents[0], columns = x.extents[1];
#pragma omp parallel for schedule(static)
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* values = load_row(x, row, scratch(0, columns));
      float* codes = scratch(1, columns);
      const float scale = format_scale(largest_magnitude(values, columns, format), format);
      if (out[1]) out[1].as<float>()[row] = scale;
      if (!q) continue;
      if (format == DType::i8)
        divide_by(values, columns, scale, codes);
      else
        multiply_by(values, columns, 1.0f / scale, codes);
      store_row(q, row, codes);
    }
  };
}

Launch prepare_columns(const OpInstance& op) {
  return [format = op.outputs[0].dtype](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &t = out[0];
    const std::int64_t rows = x.extents[0], columns = x.extents[1];
#pragma omp parallel for schedule(static)
    for (std::int64_t column = 0; column < columns; ++column) {
      float* values = scratch(0, rows);
      float value = 0;
      for (std::int64_t row = 0; row < rows; ++row) values[row] = *load(x, row * columns + column, 1, &value);
      const float scale = format_scale(largest_magnitude(values, rows, format), format);
      if (out[1]) out[1].as<float>()[column] = scale;
      if (!t) continue;
      divide_by(values, rows, scale, values);
      store_row(t, column, values);
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

// ---- what is supported ----

bool is_low(DType type) { return type == DType::e4m3 || type == DType::e5m2 || type == DType::i8; }

OpSupport refuse(const OpInstance& op, const std::string& what) { return {op.kind + ": " + what, 0}; }

/// `q` and `t`: indices of the outputs.
OpSupport query_codes(const OpInstance& op, std::size_t outputs, std::size_t q, std::size_t t) {
  if (std::string text = check_operands(op, 0, 0); !text.empty()) return {text, 0};
  if (op.outputs.size() != outputs) return refuse(op, "takes " + std::to_string(outputs) + " outputs");
  const Operand &x = op.inputs[0], &codes = op.outputs[q], &transposed = op.outputs[t];
  const DType format = format_of(op);
  if (x.extents.size() != 2 || (x.dtype != DType::f32 && x.dtype != DType::bf16))
    return refuse(op, "x must be a matrix in f32 or bf16");
  if (!is_low(format)) return refuse(op, "the format must be e4m3, e5m2 or i8, not " + std::string(name_of(format)));
  auto fits = [format](const Operand& output, const Extents& extents) {
    return !output.present || (output.dtype == format && output.extents == extents);
  };
  if (!fits(codes, x.extents) || !fits(transposed, {x.extents[1], x.extents[0]}))
    return refuse(op, "q must have the shape of x and t its transpose, both in " + std::string(name_of(format)));
  const bool needs_spare = transposed.present && !codes.present;
  return {{}, needs_spare ? static_cast<std::size_t>(element_count(x.extents)) : 0};
}

OpSupport query_scaled(const OpInstance& op) {
  const bool delayed = op.kind == "quantize_delayed", given = op.kind == "quantize_amax";
  if (op.inputs.size() != (delayed || given ? 2 : 1))
    return refuse(op, delayed ? "takes x and its state" : given ? "takes x and its amax" : "takes x");
  if (given && (op.inputs[1].count() != 1 || op.inputs[1].dtype != DType::f32))
    return refuse(op, "the amax must be f32 (1)");
  OpSupport support = query_codes(op, 3, 0, 2);
  if (!support.refusal.empty()) return support;
  const Operand& scale = op.outputs[1];
  if (!scale.present || scale.dtype != DType::f32 || scale.extents != Extents{1})
    return refuse(op, "scale must be f32 (1)");
  if (delayed && op.inputs[1].count() != kScaleStateWords + op.attributes.integer("history"))
    return refuse(op, "the state's size does not fit its history");
  if (delayed && format_of(op) == DType::i8) return refuse(op, "the format must be e4m3 or e5m2");
  return support;
}

OpSupport query_amax(const OpInstance& op) {
  const auto count = static_cast<std::int64_t>(op.inputs.size());
  if (count == 0 || op.outputs != std::vector<Operand>{{DType::f32, {count}, true, false}})
    return refuse(op, "takes tensors and gives f32, one element for each");
  for (const Operand& x : op.inputs)
    if (!x.present || (x.dtype != DType::f32 && x.dtype != DType::bf16)) return refuse(op, "takes f32 or bf16");
  return is_low(format_of(op)) ? OpSupport{} : refuse(op, "the format must be e4m3, e5m2 or i8");
}

OpSupport query_by(const OpInstance& op) {
  if (op.inputs.size() != 2 || op.inputs[1].count() != 1) return refuse(op, "takes x and its scale");
  return query_codes(op, 2, 0, 1);
}

OpSupport query_rows(const OpInstance& op) {
  if (std::string text = check_operands(op, 0, 0); !text.empty()) return {text, 0};
  if (op.inputs.size() != 1 || op.outputs.size() != 2) return refuse(op, "takes x, gives q and its scales");
  const Operand &x = op.inputs[0], &q = op.outputs[0], &scale = op.outputs[1];
  if (x.extents.size() != 2 || q.extents != x.extents || !is_low(q.dtype) || scale.dtype != DType::f32 ||
      scale.extents != Extents{x.extents[0]})
    return refuse(op, "x (N, C) gives q (N, C) in an 8-bit format and f32 scales (N)");
  return {};
}

OpSupport query_columns(const OpInstance& op) {
  if (std::string text = check_operands(op, 0, 0); !text.empty()) return {text, 0};
  if (op.inputs.size() != 1 || op.outputs.size() != 2) return refuse(op, "takes x, gives t and its scales");
  const Operand &x = op.inputs[0], &t = op.outputs[0], &scale = op.outputs[1];
  if (x.extents.size() != 2 || t.extents != Extents{x.extents[1], x.extents[0]} || !is_low(t.dtype) ||
      scale.dtype != DType::f32 || scale.extents != Extents{x.extents[1]})
    return refuse(op, "x (N, C) gives t (C, N) in an 8-bit format and f32 scales (C)");
  return {};
}

OpSupport query_advance(const OpInstance& op) {
  const Operand state{DType::f32, {kScaleStateWords + op.attributes.integer("history")}, true, false};
  if (op.inputs != std::vector{state} || op.outputs != op.inputs)
    return refuse(op, "takes a state of the size that fits its history, in place");
  return {};
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
}

}  // namespace quern::cpu
