// Ops that bring a matrix x (N, C) to an 8-bit format: q (N, C) with x about q * scale, and t (C, N), q transposed, for
// the matmuls that sum over tokens. Unread outputs are not made. Scales are format_scale's.
// A NaN in x shows as a NaN code; i8 has none, and there the scale becomes NaN (quantize_by, whose scale is given,
// values 0).
#include "program/ops/ops.h"
#include "quern/block_scales.h"
#include "quern/quantized_format.h"
#include "quern/step_state.h"

namespace quern::ops {

namespace {

DType format_of(const InferContext& c) {
  auto format = dtype_named(c.attributes.word("format"));
  if (!format || size_of(*format) != 1 || *format == DType::u8) c.refuse(0, "a format of 8 bits");
  return *format;
}

/// Of row or column scales, whose integers may have fewer bits than their bytes, and may round stochastically: one
/// value then quantizes differently from place to place in a row (column), but not from row to row.
DType format_of_line(InferContext& c) {
  const QuantizedFormat* format = quantized_format_named(c.attributes.word("format"));
  if (!format) c.refuse(0, "a format of at most 8 bits");
  if (c.attributes.integer_or("stochastic", 0) != 0 && format->dtype != DType::i8)
    c.refuse(0, "format i8 or i4 for stochastic rounding");
  return format->dtype;
}

void give_codes(InferContext& c, std::size_t q, std::size_t t) {
  need_rank(c, 0, 2);
  const Shape& x = c.inputs[0]->shape;
  DType format = format_of(c);
  give(c, q, x, format);
  give(c, t, {x[1], x[0]}, format);
}

void need_state(const InferContext& c, std::size_t input) {
  std::int64_t history = c.attributes.integer("history");
  need_vector(c, input, kScaleStateWords + history);
}

/// q and t of matrices whose rows may be tokens, with scales laid out as row or column block scales.
void infer_lines(InferContext& c) {
  give_codes(c, 0, 2);
  const Dim rows = c.inputs[0]->shape[0], columns = c.inputs[0]->shape[1];
  if (!columns.is_fixed()) c.refuse(0, "rows whose size does not depend on the micro-batch");
  const std::int64_t blocks = scale_blocks(columns.fixed);
  give(c, 1, {blocks, rows}, DType::f32);
  Dim t_scale = Dim::tokens(rows.per_token * blocks, columns.fixed + rows.fixed * blocks);
  t_scale.per_row = rows.per_row * blocks;
  give(c, 3, {t_scale}, DType::f32);
}

/// The same of quantize_blocks, which has other scales of square blocks.
void infer_blocks(InferContext& c) {
  if (c.attributes.integer_or("square", 0) == 0) return infer_lines(c);
  give_codes(c, 0, 2);
  const Dim rows = c.inputs[0]->shape[0], columns = c.inputs[0]->shape[1];
  if (!columns.is_fixed() || !rows.is_fixed()) c.refuse(0, "a matrix whose sizes do not depend on the micro-batch");
  const Extents scale = square_scales(rows.fixed, columns.fixed), t_scale = square_scales(columns.fixed, rows.fixed);
  give(c, 1, {scale[0], scale[1]}, DType::f32);
  give(c, 3, {t_scale[0], t_scale[1]}, DType::f32);
}

std::vector<OpSpec::QuantizedOutput> one_scale(const Attributes&) { return {{0, 1}}; }

void add_tensor_scales(OpSet& set) {
  // One scale for the tensor, from its own amax.
  set.add({.kind = "quantize",
           .inputs = {"x"},
           .outputs = {"q", "scale", "t"},
           .infer =
               [](InferContext& c) {
                 give_codes(c, 0, 2);
                 give(c, 1, {1}, DType::f32);
               },
           .op_class = OpClass::conversion,
           .recompute = {{.kind = "quantize_by", .kept_output = 1}},
           .quantized = one_scale,
           .of_amax = "quantize_amax",
           .transposed = {{2, 0}}});
  // The same from an amax that is given: of a matrix of which this is a part.
  set.add({.kind = "quantize_amax",
           .inputs = {"x", "amax"},
           .outputs = {"q", "scale", "t"},
           .infer =
               [](InferContext& c) {
                 give_codes(c, 0, 2);
                 need_vector(c, 1, 1);
                 give(c, 1, {1}, DType::f32);
               },
           .op_class = OpClass::conversion,
           .quantized = one_scale,
           .row_groups = [](const OpInstance& op) { return std::int64_t{op.outputs[2].present ? 0 : 1}; },
           .transposed = {{2, 0}}});
  // The largest magnitude of each tensor; a NaN takes no part, but for the format i8, for which it counts as infinite.
  set.add({.kind = "amax", .inputs = {"x*"}, .outputs = {"amaxes"}, .infer = [](InferContext& c) {
             give(c, 0, {static_cast<std::int64_t>(c.inputs.size())}, DType::f32);
           }});
}

void add_delayed_scales(OpSet& set) {
  // One scale for the tensor, known before x is seen: from `state` (ScaleState), which also records x's amax. When x
  // does not fit, it is quantized again with the scale of its own amax, which then holds for the rest of the step.
  set.add({.kind = "quantize_delayed",
           .inputs = {"x", "state"},
           .outputs = {"q", "scale", "t"},
           .infer =
               [](InferContext& c) {
                 give_codes(c, 0, 2);
                 need_state(c, 1);
                 give(c, 1, {1}, DType::f32);
               },
           .op_class = OpClass::conversion,
           .recompute = {{.kind = "quantize_by", .kept_output = 1}},
           .quantized =
               [](const Attributes&) {
                 return std::vector<OpSpec::QuantizedOutput>{{0, 1, "tensor", 1}};
               },
           .transposed = {{2, 0}}});
  // Once per optimizer step: the amax of the step enters the history, whose maximum gives the next scale.
  set.add({.kind = "advance_scale",
           .inputs = {"state"},
           .outputs = {"advanced"},
           .infer =
               [](InferContext& c) {
                 need_state(c, 0);
                 same(c, 0, 0);
               },
           .updates = {{0, 0}}});
  set.add({.kind = "quantize_by",
           .inputs = {"x", "scale"},
           .outputs = {"q", "t"},
           .infer =
               [](InferContext& c) {
                 give_codes(c, 0, 1);
                 need_vector(c, 1, 1);
               },
           .op_class = OpClass::conversion,
           .transposed = {{1, 0}}});
}

void add_scales_of_parts(OpSet& set) {
  // One scale a row, from the row's amax.
  set.add({.kind = "quantize_rows",
           .inputs = {"x"},
           .outputs = {"q", "scale"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 0, 2);
                 give(c, 0, c.inputs[0]->shape, format_of_line(c));
                 give(c, 1, {c.inputs[0]->shape[0]}, DType::f32);
               },
           .op_class = OpClass::conversion,
           .quantized =
               [](const Attributes&) {
                 return std::vector<OpSpec::QuantizedOutput>{{0, 1, "rows"}};
               },
           .row_groups = [](const OpInstance&) { return std::int64_t{1}; }});
  // One scale a column, from the column's amax; only the transposed values.
  set.add({.kind = "quantize_columns",
           .inputs = {"x"},
           .outputs = {"t", "scale"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 0, 2);
                 const Shape& x = c.inputs[0]->shape;
                 give(c, 0, {x[1], x[0]}, format_of_line(c));
                 give(c, 1, {x[1]}, DType::f32);
               },
           .op_class = OpClass::conversion,
           .quantized =
               [](const Attributes&) {
                 return std::vector<OpSpec::QuantizedOutput>{{0, 1, "columns"}};
               }});
  // One scale for each block of 128 elements of a row of q, and for each of a row of t, which so is not q transposed
  // but x transposed and quantized; with square = 1 (parameters) one for each 128 x 128 elements, and t is q
  // transposed. Layouts of the scales: row_block_scales, column_block_scales, square_scales.
  set.add({.kind = "quantize_blocks",
           .inputs = {"x"},
           .outputs = {"q", "scale", "t", "t_scale"},
           .infer = infer_blocks,
           .op_class = OpClass::conversion,
           .quantized =
               [](const Attributes& attributes) {
                 if (attributes.integer_or("square", 0) != 0)
                   return std::vector<OpSpec::QuantizedOutput>{{0, 1, "squares"}};
                 return std::vector<OpSpec::QuantizedOutput>{{0, 1, "row_blocks"}, {2, 3, "column_blocks"}};
               },
           .row_groups =
               [](const OpInstance& op) {
                 const bool square = op.attributes.integer_or("square", 0) != 0;
                 return square && !op.outputs[2].present && !op.outputs[3].present ? kScaleBlock : std::int64_t{0};
               }});
  // One scale for each 128 x 128 elements of x, whose rows may be tokens. Scales are laid out as row or column scales,
  // where each is found 128 times.
  set.add({.kind = "quantize_squares",
           .inputs = {"x"},
           .outputs = {"q", "scale", "t", "t_scale"},
           .infer = infer_lines,
           .op_class = OpClass::conversion,
           .quantized =
               [](const Attributes&) {
                 return std::vector<OpSpec::QuantizedOutput>{{0, 1, "row_blocks"}};
               },
           .transposed = {{2, 0}}});
}

}  // namespace

void add_quantize(OpSet& set) {
  add_tensor_scales(set);
  add_delayed_scales(set);
  add_scales_of_parts(set);
  // Statistics of x's values and of their loss under its scales, added up: ScaleObservation. `layout` of the scales:
  // tensor (1), rows (N), columns (C), row_blocks, column_blocks or squares as quantize_blocks leaves them. With the
  // state of a delayed scale, clipped is what lay beyond the scale that was assumed.
  set.add({.kind = "observe_scale",
           .inputs = {"x", "scale", "state?"},
           .outputs = {"observed"},
           .infer = [](InferContext& c) {
             need_rank(c, 0, 2);
             if (!quantized_format_named(c.attributes.word("format"))) c.refuse(0, "a format of at most 8 bits");
             if (!scale_layout_named(c.attributes.word("layout"))) c.refuse(1, "a known layout");
             give(c, 0, {kScaleObservationWords}, DType::u32);
           }});
}

}  // namespace quern::ops
