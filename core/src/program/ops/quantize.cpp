// Ops that bring a matrix x (N, C) to an 8-bit format: q (N, C) with x about q * scale, and t (C, N), q transposed, for
// the products that sum over tokens. Outputs that nobody reads are not made. Scales are those of format_scale.
#include "program/ops/ops.h"
#include "quern/step_state.h"

namespace quern::ops {

namespace {

DType format_of(const InferContext& c) {
  auto format = dtype_named(c.attributes.word("format"));
  if (!format || size_of(*format) != 1 || *format == DType::u8) c.refuse(0, "a format of 8 bits");
  return *format;
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

}  // namespace

void add_quantize(OpSet& set) {
  // One scale for the tensor, from its own amax.
  set.add({.kind = "quantize",
           .inputs = {"x"},
           .outputs = {"q", "scale", "t"},
           .infer =
               [](InferContext& c) {
                 give_codes(c, 0, 2);
                 give(c, 1, {1}, DType::f32);
               },
           .again = {{.kind = "quantize_by", .kept_output = 1}}});
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
           .again = {{.kind = "quantize_by", .kept_output = 1}}});
  set.add({.kind = "quantize_by", .inputs = {"x", "scale"}, .outputs = {"q", "t"}, .infer = [](InferContext& c) {
             give_codes(c, 0, 1);
             need_vector(c, 1, 1);
           }});
  // One scale a row, from the row's amax.
  set.add({.kind = "quantize_rows", .inputs = {"x"}, .outputs = {"q", "scale"}, .infer = [](InferContext& c) {
             need_rank(c, 0, 2);
             give(c, 0, c.inputs[0]->shape, format_of(c));
             give(c, 1, {c.inputs[0]->shape[0]}, DType::f32);
           }});
  // One scale a column, from the column's amax; only the transposed codes.
  set.add({.kind = "quantize_columns", .inputs = {"x"}, .outputs = {"t", "scale"}, .infer = [](InferContext& c) {
             need_rank(c, 0, 2);
             const Shape& x = c.inputs[0]->shape;
             give(c, 0, {x[1], x[0]}, format_of(c));
             give(c, 1, {x[1]}, DType::f32);
           }});
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
}

}  // namespace quern::ops
