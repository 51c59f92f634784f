// Layer norm over the channels of each token, its gradient, and both fused with the residual add beside them.

#include "norms/norm_ops.h"
#include "primitives/blocks.h"
#include "primitives/row_math.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

enum Slot : int { kWeight, kBias, kX, kOther, kSum, kY };

void keep(const View& mean, const View& rstd, std::int64_t row, LayerStatistics s) {
  if (mean) mean.as<float>()[row] = s.mean;
  if (rstd) rstd.as<float>()[row] = s.rstd;
}

// x (N, C), weight (C), bias (C) -> y (N, C), mean (N) f32, rstd (N) f32
Launch prepare_layer_norm(const OpInstance& op) {
  auto eps = static_cast<float>(op.attributes.real("eps"));
  return [eps](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &y = out[0];
    std::int64_t columns = x.columns();
    const float* weight = load(in[1], 0, columns, scratch(kWeight, columns));
    const float* bias = load(in[2], 0, columns, scratch(kBias, columns));
    for_blocks(x.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *y_space = scratch(kY, columns);
      for (std::int64_t row = begin; row < end; ++row) {
        const float* x_row = load_row(x, row, x_space);
        LayerStatistics s = layer_statistics(x_row, columns, eps);
        keep(out[1], out[2], row, s);
        if (!y) continue;
        float* y_row = target_row(y, row, y_space);
        layer_scale(x_row, s, weight, bias, columns, y_row);
        store_row(y, row, y_row);
      }
    });
  };
}

// a (N, C), b (N, C), weight (C), bias (C) -> s = a + b, y = layer_norm(s), mean (N) f32, rstd (N) f32
Launch prepare_add_layer_norm(const OpInstance& op) {
  auto eps = static_cast<float>(op.attributes.real("eps"));
  DType sum_dtype = op.outputs[0].dtype;
  return [eps, sum_dtype](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &a = in[0], &b = in[1], &sum = out[0], &y = out[1];
    std::int64_t columns = a.columns();
    const float* weight = load(in[2], 0, columns, scratch(kWeight, columns));
    const float* bias = load(in[3], 0, columns, scratch(kBias, columns));
    for_blocks(a.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *a_space = scratch(kX, columns), *b_space = scratch(kOther, columns);
      float *sum_space = scratch(kSum, columns), *y_space = scratch(kY, columns);
      for (std::int64_t row = begin; row < end; ++row) {
        float* sum_row = place_row(sum, row, sum_space);
        add_rows(load_row(a, row, a_space), load_row(b, row, b_space), columns, sum_row);
        finish_row(sum, sum_dtype, row, columns, sum_row);
        LayerStatistics s = layer_statistics(sum_row, columns, eps);
        keep(out[2], out[3], row, s);
        if (!y) continue;
        float* y_row = target_row(y, row, y_space);
        layer_scale(sum_row, s, weight, bias, columns, y_row);
        store_row(y, row, y_row);
      }
    });
  };
}

// dy, x (N, C), weight (C), mean, rstd (N) f32 -> dx (N, C), dweight (C), dbias (C); with `added`, also e (N, C) -> dx
// + e
Launch prepare_layer_norm_grad(const OpInstance& op, bool added) {
  DType dx_dtype = op.outputs[0].dtype;
  bool accumulate_weight = op.outputs[1].accumulate, accumulate_bias = op.outputs[2].accumulate;
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &dy = in[0], &x = in[1], &mean = in[3], &rstd = in[4], &dx = out[0], &dweight = out[1], &dbias = out[2];
    const View e = added ? in[5] : View{}, sum = added ? out[3] : View{};
    std::int64_t rows = x.rows(), columns = x.columns();
    const float* weight = load(in[2], 0, columns, scratch(kWeight, columns));
    auto* partials = static_cast<float*>(exec.workspace);
    ColumnSums dweight_sums(partials, rows, columns);
    if (dweight) partials += ColumnSums::bytes(rows, columns) / sizeof(float);
    ColumnSums dbias_sums(partials, rows, columns);
    for_blocks(rows, kBlockRows, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *dy_space = scratch(kOther, columns);
      float *dx_space = scratch(kSum, columns), *sum_space = scratch(kY, columns);
      float* partial_weight = dweight ? dweight_sums.start(block) : nullptr;
      float* partial_bias = dbias ? dbias_sums.start(block) : nullptr;
      for (std::int64_t row = begin; row < end; ++row) {
        float* dx_row = place_row(dx, row, dx_space);
        layer_grad(load_row(dy, row, dy_space), load_row(x, row, x_space), weight,
                   {mean.as<float>()[row], rstd.as<float>()[row]}, columns, dx_row, partial_weight, partial_bias);
        finish_row(dx, dx_dtype, row, columns, dx_row);
        if (!sum) continue;
        float* sum_row = target_row(sum, row, sum_space);
        add_rows(dx_row, load_row(e, row, x_space), columns, sum_row);
        store_row(sum, row, sum_row);
      }
    });
    if (dweight) dweight_sums.finish(dweight, accumulate_weight);
    if (dbias) dbias_sums.finish(dbias, accumulate_bias);
  };
}

OpSupport query_layer_norm(const OpInstance& op, bool added) {
  OperandCheck check(op, added ? 4 : 3, added ? 4 : 3);
  operands::check_norm(check, op, true, added);
  return check.support();
}

OpSupport query_layer_norm_grad(const OpInstance& op, bool added) {
  const auto [rows, columns] = matrix_of(op, 1);
  OperandCheck check(op, added ? 6 : 5, added ? 4 : 3);
  operands::check_norm_grad(check, op, true, added);
  std::size_t sums = check.ok() ? std::size_t{op.outputs[1].present} + std::size_t{op.outputs[2].present} : 0;
  return check.support(sums * ColumnSums::bytes(rows, columns));
}

}  // namespace

void add_layer_norm_ops(OpTable& table) {
  table["layer_norm"] = {prepare_layer_norm, [](const OpInstance& op) { return query_layer_norm(op, false); }};
  table["add_layer_norm"] = {prepare_add_layer_norm, [](const OpInstance& op) { return query_layer_norm(op, true); }};
  table["layer_norm_grad"] = {[](const OpInstance& op) { return prepare_layer_norm_grad(op, false); },
                              [](const OpInstance& op) { return query_layer_norm_grad(op, false); }};
  table["layer_norm_grad_add"] = {[](const OpInstance& op) { return prepare_layer_norm_grad(op, true); },
                                  [](const OpInstance& op) { return query_layer_norm_grad(op, true); }};
}

}  // namespace quern::cpu
