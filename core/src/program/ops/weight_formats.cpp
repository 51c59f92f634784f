// Ops of matrices in the formats of quern/weight_format.h: weights that matmuls read in 8 bits or fewer, with masters
// or without.
#include "program/ops/ops.h"
#include "quern/weight_format.h"

namespace quern::ops {

namespace {

const WeightFormat& format_of(const InferContext& c) {
  const WeightFormat* format = weight_format_named(c.attributes.word("format"));
  if (!format) c.refuse(0, "a format of quern/weight_format.h");
  return *format;
}

Shape scales_of(const WeightFormat& format, const Shape& x) {
  if (format.group == 0) return {x[0]};
  return {x[0], format.row_scales(x[1].fixed)};
}

}  // namespace

void add_weight_formats(OpSet& set) {
  // x (R, C) in integers, packed: q (R, row_bytes(C)), and scales, (R) or (R, C / group).
  set.add({.kind = "quantize_weights",
           .inputs = {"x"},
           .outputs = {"q", "scale"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 0, 2);
                 const WeightFormat& format = format_of(c);
                 const Shape& x = c.inputs[0]->shape;
                 if (!x[1].is_fixed() || !format.takes(x[1].fixed))
                   c.refuse(0, "rows of whole bytes and groups of format " + std::string(format.name));
                 give(c, 0, {x[0], format.row_bytes(x[1].fixed)}, format.dtype());
                 give(c, 1, scales_of(format, x), DType::f32);
               },
           .op_class = OpClass::conversion,
           .row_groups = [](const OpInstance&) { return std::int64_t{1}; }});
  // x again, in `dtype`; i8, without scales: the integers. Ops that differ in `use` alone are not made one, so that a
  // copy for the forward pass is not kept for the backward pass.
  set.add({.kind = "dequantize_weights",
           .inputs = {"q", "scale?"},
           .outputs = {"x"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 0, 2);
                 const Shape& q = c.inputs[0]->shape;
                 const std::int64_t in_byte = 8 / format_of(c).bits;
                 give(c, 0, {q[0], q[1].fixed * in_byte}, dtype_named(c.attributes.word("dtype")).value_or(DType::f32));
               },
           .op_class = OpClass::conversion});
  // An optimizer's x back into q and its scales, in place; rounded stochastically.
  set.add({.kind = "requantize_weights",
           .inputs = {"update", "step", "x", "q", "scale"},
           .outputs = {"new_q", "new_scale"},
           .infer = [](InferContext&) {},
           .updates = {{0, 3}, {1, 4}},
           .locality = UpdateLocality::row});
}

}  // namespace quern::ops
