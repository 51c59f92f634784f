// linear and its three matmuls, which the precision backend lowers, and the ops that they are lowered to.
#include "program/ops/ops.h"
#include "quern/error.h"

namespace quern::ops {

namespace {

Cost matmul_cost(const OpInstance& op) {
  const Operand& a = op.inputs[0];
  const Operand& y = op.outputs[0];
  double inner = static_cast<double>(op.attributes.integer_or("transpose_a", 0) ? a.extents[0] : a.extents[1]);
  Cost cost{
      .flops = 2.0 * static_cast<double>(element_count(y.extents)) * inner, .tensor_core = true, .format = a.dtype};
  for (const Operand& operand : op.inputs) cost.bytes += static_cast<double>(operand.bytes());
  cost.bytes += static_cast<double>(y.bytes()) * (y.accumulate ? 2 : 1);
  return cost;
}

void infer_matmul(InferContext& c) {
  need_rank(c, 0, 2);
  need_rank(c, 1, 2);
  bool ta = c.attributes.integer_or("transpose_a", 0) != 0, tb = c.attributes.integer_or("transpose_b", 0) != 0;
  const Shape& a = c.inputs[0]->shape;
  const Shape& b = c.inputs[1]->shape;
  if (a[ta ? 0 : 1] != b[tb ? 1 : 0]) c.refuse(1, "an inner dimension that matches " + to_string(a));
  Dim columns = b[tb ? 0 : 1];
  if (c.inputs.size() > 2 && c.inputs[2]) need_vector(c, 2, columns);
  give(c, 0, {a[ta ? 1 : 0], columns}, c.activation_dtype);
}

void infer_stacked_matmul(InferContext& c) {
  need_rank(c, 0, 3);
  need_rank(c, 1, 3);
  const bool ta = c.attributes.integer("transpose_a") != 0, tb = c.attributes.integer("transpose_b") != 0;
  const Shape &a = c.inputs[0]->shape, &b = c.inputs[1]->shape;
  if (a[0] != b[0] || a[ta ? 1 : 2] != b[tb ? 2 : 1]) c.refuse(1, "as many matrices that match " + to_string(a));
  const Shape y{a[0], a[ta ? 2 : 1], b[tb ? 1 : 2]};
  if (c.inputs.size() > 2 && c.inputs[2] && c.inputs[2]->shape != y) c.refuse(2, to_string(y));
  give(c, 0, y, c.inputs[0]->dtype);
}

Cost stacked_matmul_cost(const OpInstance& op) {
  const Operand &a = op.inputs[0], &y = op.outputs[0];
  const std::int64_t inner = a.extents[op.attributes.integer("transpose_a") != 0 ? 1 : 2];
  Cost cost{.flops = 2.0 * static_cast<double>(y.count()) * static_cast<double>(inner),
            .tensor_core = true,
            .format = a.dtype};
  for (const Operand& operand : op.inputs) cost.bytes += static_cast<double>(operand.bytes());
  cost.bytes += static_cast<double>(y.bytes());
  return cost;
}

// Matmuls of few inner dimensions, with columns of a wide matrix: how adapters of parts of a packed matrix reach its
// result. They move little more than the columns.

Cost narrow_cost(const OpInstance& op, const Operand& narrow, std::int64_t columns, double passes) {
  const double rows = static_cast<double>(narrow.extents[0]), rank = static_cast<double>(narrow.extents[1]);
  const double wide = rows * static_cast<double>(columns);
  Cost cost{.flops = 2 * wide * rank, .tensor_core = true, .format = narrow.dtype};
  cost.bytes = static_cast<double>(narrow.bytes()) + wide * passes * static_cast<double>(size_of(op.inputs[0].dtype));
  return cost;
}

void need_columns(InferContext& c, std::size_t wide, std::int64_t columns) {
  need_rank(c, wide, 2);
  const std::int64_t first = c.attributes.integer("first"), width = c.inputs[wide]->shape[1].fixed;
  if (first < 0 || first + columns > width)
    c.refuse(wide, "at least " + std::to_string(first + columns) + " columns, and a first one");
}

void add_narrow_matmuls(OpSet& set) {
  // y with factor * a b^T (a b where transpose_b is 0) added to its columns from `first` on.
  set.add({.kind = "add_matmul",
           .inputs = {"y", "a", "b"},
           .outputs = {"sum"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 1, 2);
                 need_rank(c, 2, 2);
                 const bool turned = c.attributes.integer("transpose_b") != 0;
                 if (c.inputs[2]->shape[turned ? 1 : 0] != c.inputs[1]->shape[1])
                   c.refuse(2, "an inner dimension that matches " + to_string(c.inputs[1]->shape));
                 need_columns(c, 0, c.inputs[2]->shape[turned ? 0 : 1].fixed);
                 if (c.inputs[0]->shape[0] != c.inputs[1]->shape[0])
                   c.refuse(1, "as many rows as " + to_string(c.inputs[0]->shape));
                 same(c, 0, 0);
               },
           .backward =
               [](BackwardContext& b) {
                 if (b.op().attributes.integer("transpose_b") == 0)
                   fail_internal("op add_matmul", "has a backward rule with transpose_b = 1 alone");
                 b.set_input_grad(0, b.output_grad());
                 b.emit("columns_weight_grad", {b.output_grad(), b.input(1), b.input(2)}, {2}, b.op().attributes);
                 b.emit("columns_matmul", {b.output_grad(), b.input(2)}, {1}, b.op().attributes);
               },
           .may_overwrite = {{0, 0}},
           .cost =
               [](const OpInstance& op) {
                 const bool turned = op.attributes.integer("transpose_b") != 0;
                 return narrow_cost(op, op.inputs[1], op.inputs[2].extents[turned ? 0 : 1], 2);
               }});
  // factor * x b, of columns of x from `first` on, as many as b has rows.
  set.add({.kind = "columns_matmul",
           .inputs = {"x", "b"},
           .outputs = {"y"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 1, 2);
                 need_columns(c, 0, c.inputs[1]->shape[0].fixed);
                 give(c, 0, {c.inputs[0]->shape[0], c.inputs[1]->shape[1]}, c.inputs[0]->dtype);
               },
           .cost = [](const OpInstance& op) { return narrow_cost(op, op.outputs[0], op.inputs[1].extents[0], 1); }});
  // factor * x^T a, of the same columns of x. b is an operand only for its shape.
  set.add({.kind = "columns_weight_grad",
           .inputs = {"x", "a", "b"},
           .outputs = {"db"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 2, 2);
                 need_columns(c, 0, c.inputs[2]->shape[0].fixed);
                 same(c, 0, 2);
               },
           .cost = [](const OpInstance& op) { return narrow_cost(op, op.inputs[1], op.inputs[2].extents[0], 1); }});
}

void add_products(OpSet& set) {
  set.add({.kind = "linear",
           .inputs = {"x", "weight", "bias?"},
           .outputs = {"y"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 0, 2);
                 need_rank(c, 1, 2);
                 if (c.inputs[0]->shape[1] != c.inputs[1]->shape[1])
                   c.refuse(1, "(out, " + std::to_string(c.inputs[0]->shape[1].fixed) + ")");
                 if (c.inputs[2]) need_vector(c, 2, c.inputs[1]->shape[0]);
                 give(c, 0, {c.inputs[0]->shape[0], c.inputs[1]->shape[0]}, c.activation_dtype);
               },
           .backward =
               [](BackwardContext& b) {
                 ValueId dy = b.output_grad();
                 b.emit("linear_weight_grad", {dy, b.input(0), b.input(1)}, {1});
                 if (b.input(2) != kNoValue) b.emit("column_sum", {dy}, {2});
                 b.emit("linear_input_grad", {dy, b.input(1)}, {0}, b.op().attributes);
               },
           .product = Product::output});
  set.add({.kind = "linear_input_grad",
           .inputs = {"dy", "weight"},
           .outputs = {"dx"},
           .infer =
               [](InferContext& c) {
                 give(c, 0, {c.inputs[0]->shape[0], c.inputs[1]->shape[1]}, c.inputs[0]->dtype);
               },
           .product = Product::input_gradient});
  // The weight is an operand only for its shape.
  set.add({.kind = "linear_weight_grad",
           .inputs = {"dy", "x", "weight"},
           .outputs = {"dweight"},
           .infer = [](InferContext& c) { same(c, 0, 2); },
           .product = Product::weight_gradient});
}

}  // namespace

void add_linear(OpSet& set) {
  add_products(set);
  add_narrow_matmuls(set);
  // y = op(a) op(b) * scale_a * scale_b + bias; scales are (1), or one a row of op(a) and one a column of op(b).
  // With the attribute scale_rows_b, and a b^T (transpose_a 0, transpose_b 1): each 128 elements of a row of a have a
  // scale (row_block_scales of a, or column_block_scales of what a is the transpose of), and so has each block of
  // scale_rows_b x 128 elements of b: 1, likewise, or 128 (square_scales). With square_scales = 1 beside it scales that
  // are laid out one for a row belong to 128 x 128 elements (quantize_squares): the first of 128 holds for all. One
  // operand may then be not K-major, with the scales of the matrix it is the transpose of.
  set.add({.kind = "matmul",
           .inputs = {"a", "b", "bias?", "scale_a?", "scale_b?"},
           .outputs = {"y"},
           .infer = infer_matmul,
           .cost = matmul_cost});
  // Of each matrix of stacks (n, rows, columns): y = alpha op(a) op(b) + beta c, rounded once.
  set.add({.kind = "stacked_matmul",
           .inputs = {"a", "b", "c?"},
           .outputs = {"y"},
           .infer = infer_stacked_matmul,
           .cost = stacked_matmul_cost});
  set.add({.kind = "transpose",
           .inputs = {"x"},
           .outputs = {"t"},
           .infer =
               [](InferContext& c) {
                 need_rank(c, 0, 2);
                 give(c, 0, {c.inputs[0]->shape[1], c.inputs[0]->shape[0]}, c.inputs[0]->dtype);
               },
           .op_class = OpClass::conversion,
           .transposes = true});
  set.add({.kind = "cast",
           .inputs = {"x", "scale?"},
           .outputs = {"y"},
           .infer =
               [](InferContext& c) {
                 if (c.inputs.size() > 1 && c.inputs[1]) {
                   need_rank(c, 0, 2);
                   need_rank(c, 1, 2);
                   const std::int64_t channels = c.inputs[1]->shape[1].fixed / 2;
                   if (c.inputs[1]->shape[1] != Dim(2 * channels) || channels < 1 ||
                       c.inputs[0]->shape[1].fixed % channels != 0)
                     c.refuse(1, "a factor and a summand of each channel, whose number divides the columns of x");
                 }
                 give(c, 0, c.inputs[0]->shape, dtype_named(c.attributes.word("dtype")).value_or(DType::f32));
               },
           .op_class = OpClass::conversion,
           .row_groups = [](const OpInstance& op) { return std::int64_t{op.inputs.size() > 1 ? 0 : 1}; }});
}

}  // namespace quern::ops
