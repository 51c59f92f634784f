#include "shared/operands/op_checks.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "quern/block_scales.h"
#include "quern/quantized_format.h"
#include "quern/step_state.h"
#include "quern/weight_format.h"

namespace quern::operands {

void check_norm(OperandCheck& check, const OpInstance& op, bool layer, bool added) {
  const auto [rows, columns] = matrix_of(op, 0);
  const Extents stream = extents_of(op, 0);
  std::size_t in = added ? 2 : 1, out = added ? 1 : 0;
  check.input(0, added ? "a" : "x", stream);
  if (added) check.input(1, "b", stream).output(0, "sum", stream);
  check.input(in++, "weight", {columns});
  if (layer) check.input(in, "bias", {columns});
  check.output(out++, "y", stream);
  if (layer) check.output(out++, "mean", {rows}, DType::f32);
  check.output(out, "rstd", {rows}, DType::f32);
}

void check_norm_grad(OperandCheck& check, const OpInstance& op, bool layer, bool added) {
  const auto [rows, columns] = matrix_of(op, 1);
  const Extents stream = extents_of(op, 1);
  std::size_t in = 3, out = 2;
  check.input(0, "dy", stream).input(1, "x", stream).input(2, "weight", {columns});
  if (layer) check.input(in++, "mean", {rows}, DType::f32);
  check.input(in++, "rstd", {rows}, DType::f32).output(0, "dx", stream).sum(1, "dweight", {columns});
  if (layer) check.sum(out++, "dbias", {columns});
  if (added) check.input(in, "e", stream).output(out, "sum", stream);
}

void check_head_norm(OperandCheck& check, const OpInstance& op, bool rotated) {
  const NormedHeads normed(op.attributes);
  check_packed(check, op, 0, "qkv");
  check.input(1, "query_weight", {normed.query_size()}).input(2, "key_weight", {normed.key_size()});
  check.output(0, "y", extents_of(op, 0)).output(1, "rstd", {matrix_of(op, 0).rows, normed.all()}, DType::f32);
  if (rotated) {
    check_rope(check, op, 3);
    check.output(2, "z", extents_of(op, 0));
  }
}

void check_head_norm_grad(OperandCheck& check, const OpInstance& op, bool rotated) {
  const NormedHeads normed(op.attributes);
  const std::size_t x = rotated ? 2 : 1, dx = rotated ? 1 : 0;
  check_packed(check, op, 0, "dy");
  if (rotated) check_rope(check, op, 1);
  check_packed(check, op, x, "qkv");
  check.input(x + 1, "query_weight", {normed.query_size()}).input(x + 2, "key_weight", {normed.key_size()});
  check.input(x + 3, "rstd", {matrix_of(op, x).rows, normed.all()}, DType::f32);
  if (rotated) check.output(0, "d", extents_of(op, x));
  check.output(dx, "dqkv", extents_of(op, x));
  check.sum(dx + 1, "dquery_weight", {normed.query_size()}).sum(dx + 2, "dkey_weight", {normed.key_size()});
}

NarrowMatmul::NarrowMatmul(const OpInstance& op)
    : first(op.attributes.integer("first")), factor(static_cast<float>(op.attributes.real("factor"))) {
  const Matrix wide = matrix_of(op, 0), weight = matrix_of(op, op.kind == "columns_matmul" ? 1 : 2);
  rows = wide.rows, width = wide.columns;
  turned = op.kind != "add_matmul" || op.attributes.integer("transpose_b") != 0;
  columns = turned ? weight.rows : weight.columns;
  rank = turned ? weight.columns : weight.rows;
}

OperandCheck check_narrow_matmul(OperandCheck check, const OpInstance& op) {
  const NarrowMatmul p(op);
  const Extents wide{p.rows, p.width}, narrow{p.rows, p.rank};
  const Extents weight = p.turned ? Extents{p.columns, p.rank} : Extents{p.rank, p.columns};
  if (op.kind == "add_matmul")
    check.input(0, "y", wide).input(1, "a", narrow).input(2, "b", weight).output(0, "sum", wide);
  else if (op.kind == "columns_matmul")
    check.input(0, "x", wide).input(1, "b", weight).output(0, "y", narrow);
  else
    check.input(0, "x", wide).input(1, "a", narrow).sum(0, "db", weight);
  check.that(p.first >= 0 && p.first + p.columns <= p.width, "columns: found " + std::to_string(p.first) + " to " +
                                                                 std::to_string(p.first + p.columns) +
                                                                 ", expected them within " + std::to_string(p.width));
  return check;
}

namespace {

constexpr const char* kUpdated[] = {"master", "moment1", "moment2"};
const Dtypes kFloats({DType::f32, DType::bf16}, "f32 or bf16");
const Dtypes kMoments({DType::f32, DType::bf16, DType::i8, DType::e4m3}, "f32, bf16, i8 or e4m3");

void check_lists(OperandCheck& check, const OpInstance& op) {
  const std::vector<double>&objects = op.attributes.list("objects"), &offsets = op.attributes.list("offsets");
  check.that(offsets.size() == objects.size(), "needs an offset for every object");
  check.input(0, "update", {4}, DType::f32).input(1, "step", {16}, DType::u32);
  for (double offset : offsets)
    check.that(std::fmod(offset, 4) == 0 && offset >= 0,
               "offset: found " + std::to_string(static_cast<std::int64_t>(offset)) + ", expected a multiple of 4");
}

/// A tensor of one of those dtypes that is updated in place.
void check_in_place(OperandCheck& check, const OpInstance& op, std::size_t in, std::size_t out, const char* name,
                    const Extents& extents, const Dtypes& dtypes) {
  check.input(in, name, extents, dtypes);
  if (check.ok()) check.output(out, name, extents, op.inputs[in].dtype);
}

/// Rows of a part.
Extents part_of(OperandCheck& check, const OpInstance& op, const Extents& whole) {
  const std::int64_t first = op.attributes.integer("first"), rows = op.attributes.integer("rows");
  check.that(whole.size() == 2 && first >= 0 && rows > 0 && first + rows <= whole[0], "needs rows of a matrix");
  return {rows, whole.empty() ? 0 : whole.back()};
}

}  // namespace

void check_element_update(OperandCheck& check, const OpInstance& op, std::size_t states) {
  check_lists(check, op);
  for (std::size_t tensor = 0; tensor < op.attributes.list("objects").size() && check.ok(); ++tensor) {
    const std::size_t in = 2 + (2 + states) * tensor, out = (1 + states) * tensor;
    const Extents extents = extents_of(op, in + 1);
    check.input(in, "gradient", extents);
    for (std::size_t i = 0; i <= states; ++i)  // no draws round more than two states
      check_in_place(check, op, in + 1 + i, out + i, i < 3 ? kUpdated[i] : "state", extents,
                     states < 3 ? kFloats : Dtypes(DType::f32));
  }
}

void check_exchange(OperandCheck& check, const OpInstance& op) {
  check.that(!op.inputs.empty() && op.inputs.size() % 2 == 0, "needs pairs of tensors");
  for (std::size_t i = 0; i < op.inputs.size() && check.ok(); ++i)
    check_in_place(check, op, i, i, "tensor", extents_of(op, i / 2 * 2), DType::f32);
}

void check_weight_format(OperandCheck& check, const OpInstance& op) {
  const WeightFormat* format = weight_format_named(op.attributes.word("format"));
  if (!check.that(format, "format: found " + op.attributes.word("format") + ", expected one of quern/weight_format.h")
           .ok())
    return;
  const bool back = op.kind == "dequantize_weights", in_place = op.kind == "requantize_weights";
  const Extents x = back ? op.outputs[0].extents : extents_of(op, in_place ? 2 : 0);
  if (!check.that(x.size() == 2 && format->takes(x[1]), "needs rows of whole bytes and groups").ok()) return;
  const Extents q{x[0], format->row_bytes(x[1])};
  const Extents scale = format->group == 0 ? Extents{x[0]} : Extents{x[0], format->row_scales(x[1])};
  if (back) {
    check.input(0, "q", q, format->dtype());
    if (op.outputs[0].dtype != DType::i8) check.input(1, "scale", scale, DType::f32);
    check.output(0, "x", x, {{DType::f32, DType::bf16, DType::i8}, "f32, bf16 or i8"});
    return;
  }
  if (in_place) {
    check_lists(check, op);
    check.input(2, "x", x, kFloats);
    check_in_place(check, op, 3, 0, "q", q, format->dtype());
    return check_in_place(check, op, 4, 1, "scale", scale, DType::f32);
  }
  check.input(0, "x", x, kFloats).output(0, "q", q, format->dtype()).output(1, "scale", scale, DType::f32);
}

void check_adamw_8bit(OperandCheck& check, const OpInstance& op) {
  const std::int64_t block = op.attributes.integer("block");
  check.that(block == 128 || block == 256, "needs blocks of 128 or 256");
  check_lists(check, op);
  for (std::size_t tensor = 0; tensor < op.attributes.list("objects").size() && check.ok(); ++tensor) {
    const std::size_t in = 2 + 6 * tensor, out = 5 * tensor;
    const Extents extents = extents_of(op, in + 1);
    check.that(extents.size() == 2, "needs matrices").input(in, "gradient", extents);
    check_in_place(check, op, in + 1, out, kUpdated[0], extents, kFloats);
    for (std::size_t i = 1; i < 3 && check.ok(); ++i) {
      check_in_place(check, op, in + 1 + i, out + i, kUpdated[i], extents, kMoments);
      if (!check.ok() || size_of(op.inputs[in + 1 + i].dtype) > 1) continue;
      check_in_place(check, op, in + 3 + i, out + 2 + i, "scales", {extents[0], (extents[1] + block - 1) / block},
                     DType::f32);
    }
  }
}

void check_muon_direction(OperandCheck& check, const OpInstance& op) {
  check_lists(check, op);
  const Extents extents = extents_of(op, 3), part = part_of(check, op, extents);
  check.input(2, "gradient", extents, kFloats);
  check_in_place(check, op, 3, 0, "moment1", extents, kFloats);
  check.output(1, "direction", part, kFloats);
}

namespace {

/// Matrix `index` of a stack of parts.
void check_in_stack(OperandCheck& check, const OpInstance& op, const Extents& part) {
  const Extents stack = extents_of(op, 3);
  const std::int64_t index = op.attributes.integer("index"), count = stack.empty() ? 0 : stack[0];
  check.that(index >= 0 && index < count,
             "index: found " + std::to_string(index) + ", expected less than " + std::to_string(count));
  check.input(3, "stack", {count, part[0], part[1]}, kFloats);
}

}  // namespace

void check_row_factors(OperandCheck& check, const OpInstance& op) {
  check_lists(check, op);
  const Extents moment = extents_of(op, 2), stack = extents_of(op, 3), part = part_of(check, op, moment);
  check_in_place(check, op, 2, 0, "moment2", moment, DType::f32);
  if (check.that(stack.size() == 3 && part[1] == 1, "needs a stack, and one element a row").ok())
    check_in_stack(check, op, {part[0], stack[2]});
  check.output(1, "factors", {part[0]}, DType::f32);
}

void check_muon_apply(OperandCheck& check, const OpInstance& op) {
  check_lists(check, op);
  const Extents extents = extents_of(op, 2), part = part_of(check, op, extents);
  check_in_place(check, op, 2, 0, "master", extents, kFloats);
  check_in_stack(check, op, part);
  if (op.inputs.size() > 4) check.input(4, "factors", {part[0]}, DType::f32);
}

void check_over_norm(OperandCheck& check, const OpInstance& op) {
  const Extents extents = extents_of(op, 1);
  const auto count = static_cast<std::int64_t>(op.inputs.size()) - 1;
  check.that(extents.size() == 2, "needs matrices").input(0, "squares", {count}, DType::f64);
  if (!check.ok()) return;
  for (std::int64_t i = 1; i <= count; ++i) check.input(static_cast<std::size_t>(i), "x", extents, kFloats);
  check.output(0, "stack", {count, extents[0], extents[1]}, kFloats);
}

StackedMatmul::StackedMatmul(const OpInstance& op)
    : transpose_a(op.attributes.integer("transpose_a") != 0),
      transpose_b(op.attributes.integer("transpose_b") != 0),
      adds(op.inputs.size() > 2 && op.inputs[2].present),
      alpha(static_cast<float>(op.attributes.real_or("alpha", 1))),
      beta(static_cast<float>(op.attributes.real_or("beta", 1))) {
  const Extents &a = op.inputs[0].extents, &b = op.inputs[1].extents;
  if (a.size() != 3 || b.size() != 3) return;
  count = a[0], m = a[transpose_a ? 2 : 1], k = a[transpose_a ? 1 : 2], n = b[transpose_b ? 1 : 2];
}

void check_stacked_matmul(OperandCheck& check, const OpInstance& op) {
  if (!check.ok()) return;
  const StackedMatmul s(op);
  check.that(op.inputs[0].extents.size() == 3 && op.inputs[1].extents.size() == 3, "multiplies stacks of matrices");
  if (!check.ok()) return;
  check.input(0, "a", op.inputs[0].extents, kFloats);
  check.input(1, "b", s.transpose_b ? Extents{s.count, s.n, s.k} : Extents{s.count, s.k, s.n}, kFloats);
  if (s.adds) check.input(2, "c", {s.count, s.m, s.n}, kFloats);
  check.output(0, "y", {s.count, s.m, s.n}, kFloats);
}

TokenRows::TokenRows(const OpInstance& op) : rows(op.geometry.batch), sequence(op.geometry.sequence) {
  columns = matrix_of(op, 0).columns;
  if (op.kind == "prepend") {
    count = matrix_of(op, 1).rows;
  } else if (op.kind == "prepend_grad") {
    count = op.attributes.integer("tokens");
  } else {
    first = op.attributes.integer("first");
    count = op.attributes.integer("count");
    if (count == 0) count = sequence - first;
  }
}

OperandCheck check_token_rows(OperandCheck check, const OpInstance& op) {
  if (!check.ok()) return check;
  const TokenRows of(op);
  check.that(of.first >= 0 && of.count > 0 && of.first + of.count <= of.sequence,
             "tokens from " + std::to_string(of.first) + " on, " + std::to_string(of.count) +
                 " of them: found rows of " + std::to_string(of.sequence));
  const Extents all{of.rows * of.sequence, of.columns}, others{of.rows * (of.sequence - of.count), of.columns};
  if (op.kind == "prepend")
    return check.input(0, "x", others).input(1, "tokens", {of.count, of.columns}).output(0, "y", all);
  if (op.kind == "prepend_grad")
    return check.input(0, "dy", all).output(0, "dx", others).sum(1, "dtokens", {of.count, of.columns});
  const bool gradient = op.kind == "row_mean_grad";
  return check.input(0, gradient ? "dmean" : "x", gradient ? Extents{of.rows, of.columns} : all)
      .output(0, gradient ? "dx" : "mean", gradient ? all : Extents{of.rows, of.columns});
}

OperandCheck check_class_loss(OperandCheck check, const OpInstance& op) {
  const std::size_t logits = op.kind == "class_loss_grad" ? 1 : 0;
  const Matrix size = matrix_of(op, logits);
  if (logits == 1) check.input(0, "dloss", {size.rows}, DType::f32);
  check.input(logits, "logits", {size.rows, size.columns}).input(logits + 1, "labels", {size.rows}, DType::i32);
  const double smoothing = op.attributes.real("smoothing");
  check.that(smoothing >= 0 && smoothing < 1, "smoothing: found " + std::to_string(smoothing) + ", expected 0 to 1");
  if (logits == 1) return check.output(0, "dlogits", {size.rows, size.columns});
  return check.output(0, "loss", {size.rows}, DType::f32).output(1, "correct", {size.rows}, DType::f32);
}

OperandCheck check_clip_scale(const OpInstance& op) {
  OperandCheck check(op, std::max<std::size_t>(op.inputs.size(), 3), 1, DType::f64, DType::f64);
  check.input(0, "stats", {4}, DType::f64).input(1, "step", {16}, DType::u32).output(0, "update", {4}, DType::f32);
  for (std::size_t i = 2; i < op.inputs.size(); ++i)
    check.input(i, "sums", {std::max<std::int64_t>(op.inputs[i].count(), 1)}, DType::f64);
  return check;
}

OperandCheck check_reduce_ranks(const OpInstance& op) {
  const Matrix x = matrix_of(op, 0);
  const bool apart = op.inputs.size() > 1;
  OperandCheck check(op, apart ? 2 : 1, 1, {{DType::f32, DType::bf16, DType::f64}, "f32, bf16 or f64"}, DType::f32);
  check.input(0, "x", {x.rows, x.columns});
  if (!check.ok()) return check;
  const DType dtype = op.inputs[0].dtype;
  const std::string& reduction = op.attributes.word("reduction");
  if (apart)
    check.input(1, "own", {x.columns}, dtype)
        .that(op.attributes.integer("own") >= 0 && op.attributes.integer("own") < x.rows, "own: expected a rank")
        .that(reduction != "tree", "a tree has no own row");
  check.output(0, "y", {x.columns}, dtype)
      .that(x.rows > 0, "without ranks")
      .that((reduction == "sum" && (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f64)) ||
                (reduction == "tree" && (dtype == DType::f32 || dtype == DType::f64)) ||
                (reduction == "maximum" && dtype == DType::f32),
            "reduction: found " + reduction + " of " + std::string(name_of(dtype)) +
                ", expected sum of f32, bf16 or f64, tree of f32 or f64, or maximum of f32");
  return check;
}

OperandCheck check_sum_tree(const OpInstance& op) {
  OperandCheck check(op, std::max<std::size_t>(op.inputs.size(), 1), op.inputs.empty() ? 0 : op.inputs.size() - 1,
                     DType::f32, DType::f32);
  check.input(0, "step", {16}, DType::u32);
  const std::int64_t block = op.attributes.integer("block");
  check.that(op.inputs.size() % 2 == 1, "takes a sum and its partials of each tensor")
      .that(block > 0 && std::has_single_bit(static_cast<std::uint64_t>(block)),
            "block: found " + std::to_string(block) + ", expected a power of two");
  if (!check.ok()) return check;
  const std::int64_t levels = std::bit_width(static_cast<std::uint64_t>(block)) - 1;
  for (std::size_t i = 1; i + 1 < op.inputs.size() && check.ok(); i += 2) {
    const Operand& sum = op.inputs[i];
    check.that(sum.dtype == DType::f32 || sum.dtype == DType::f64, "operand sum: expected f32 or f64")
        .input(i + 1, "partials", {levels, sum.count()}, sum.dtype)
        .output(i - 1, "sum", sum.extents, sum.dtype)
        .output(i, "partials", {levels, sum.count()}, sum.dtype);
  }
  return check;
}

OpSupport query_observe_scale(const OpInstance& op) {
  const bool delayed = op.inputs.size() == 3 && op.inputs[2].present;
  auto refuse = [](const char* what) { return OpSupport{std::string("observe_scale: ") + what, 0}; };
  if (op.inputs.size() < 2 || op.inputs.size() > 3 || op.outputs.size() != 1)
    return refuse("takes x, its scales and optionally their state, and gives a ScaleObservation");
  const Operand &x = op.inputs[0], &scale = op.inputs[1], &seen = op.outputs[0];
  if (!op.attributes.has("format") || !quantized_format_named(op.attributes.word("format")))
    return refuse("the format must be one of quern/quantized_format.h");
  const auto layout = scale_layout_named(op.attributes.has("layout") ? op.attributes.word("layout") : "");
  if (!layout) return refuse("unknown layout of scales");
  if (x.extents.size() != 2 || (x.dtype != DType::f32 && x.dtype != DType::bf16))
    return refuse("x must be a matrix in f32 or bf16");
  if (scale.dtype != DType::f32 || scale.extents != scale_extents(*layout, x.extents[0], x.extents[1]))
    return refuse("the scales do not fit x and their layout");
  if (delayed && (op.inputs[2].dtype != DType::f32 || op.inputs[2].count() < kScaleStateWords))
    return refuse("the state does not belong to a delayed scale");
  if (!seen.present || seen.dtype != DType::u32 || seen.count() != kScaleObservationWords)
    return refuse("gives u32 (16)");
  return {};
}

}  // namespace quern::operands
