// RMS norm over the channels of each token, its gradient, and both fused with the residual add beside them.

#include "norms/norm_ops.h"
#include "primitives/blocks.h"
#include "primitives/row_math.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

enum Slot : int { kWeight, kX, kOther, kSum, kY };

// x (N, C), weight (C) -> y (N, C), rstd (N) f32
Launch prepare_rms_norm(const OpInstance& op) {
  auto eps = static_cast<float>(op.attributes.real("eps"));
  return [eps](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &y = out[0], &rstd = out[1];
    std::int64_t columns = x.columns();
    const float* weight = load(in[1], 0, columns, scratch(kWeight, columns));
    for_blocks(x.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *y_space = scratch(kY, columns);
      for (std::int64_t row = begin; row < end; ++row) {
        const float* x_row = load_row(x, row, x_space);
        float scale = rms_rstd(x_row, columns, eps);
        if (rstd) rstd.as<float>()[row] = scale;
        if (!y) continue;
        float* y_row = target_row(y, row, y_space);
        rms_scale(x_row, scale, weight, columns, y_row);
        store_row(y, row, y_row);
      }
    });
  };
}

// a (N, C), b (N, C), weight (C) -> s = a + b, y = rms_norm(s), rstd (N) f32
Launch prepare_add_rms_norm(const OpInstance& op) {
  auto eps = static_cast<float>(op.attributes.real("eps"));
  DType sum_dtype = op.outputs[0].dtype;
  return [eps, sum_dtype](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &a = in[0], &b = in[1], &s = out[0], &y = out[1], &rstd = out[2];
    std::int64_t columns = a.columns();
    const float* weight = load(in[2], 0, columns, scratch(kWeight, columns));
    for_blocks(a.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *a_space = scratch(kX, columns), *b_space = scratch(kOther, columns);
      float *s_space = scratch(kSum, columns), *y_space = scratch(kY, columns);
      for (std::int64_t row = begin; row < end; ++row) {
        float* s_row = place_row(s, row, s_space);
        add_rows(load_row(a, row, a_space), load_row(b, row, b_space), columns, s_row);
        finish_row(s, sum_dtype, row, columns, s_row);
        float scale = rms_rstd(s_row, columns, eps);
        if (rstd) rstd.as<float>()[row] = scale;
        if (!y) continue;
        float* y_row = target_row(y, row, y_space);
        rms_scale(s_row, scale, weight, columns, y_row);
        store_row(y, row, y_row);
      }
    });
  };
}

// dy (N, C), x (N, C), weight (C), rstd (N) f32 -> dx (N, C), dweight (C); with `added`, also e (N, C) -> dx + e
Launch prepare_rms_norm_grad(const OpInstance& op, bool added) {
  DType dx_dtype = op.outputs[0].dtype;
  bool accumulate = op.outputs[1].accumulate;
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &dy = in[0], &x = in[1], &rstd = in[3], &dx = out[0], &dweight = out[1];
    const View e = added ? in[4] : View{}, sum = added ? out[2] : View{};
    std::int64_t rows = x.rows(), columns = x.columns();
    const float* weight = load(in[2], 0, columns, scratch(kWeight, columns));
    ColumnSums dweight_sums(static_cast<float*>(exec.workspace), rows, columns);
    for_blocks(rows, kBlockRows, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *dy_space = scratch(kOther, columns);
      float *dx_space = scratch(kSum, columns), *sum_space = scratch(kY, columns);
      float* partial = dweight ? dweight_sums.start(block) : nullptr;
      for (std::int64_t row = begin; row < end; ++row) {
        float* dx_row = place_row(dx, row, dx_space);
        rms_grad(load_row(dy, row, dy_space), load_row(x, row, x_space), weight, rstd.as<float>()[row], columns, dx_row,
                 partial);
        finish_row(dx, dx_dtype, row, columns, dx_row);
        if (!sum) continue;
        float* sum_row = target_row(sum, row, sum_space);
        add_rows(dx_row, load_row(e, row, x_space), columns, sum_row);
        store_row(sum, row, sum_row);
      }
    });
    if (dweight) dweight_sums.finish(dweight, accumulate);
  };
}

OpSupport query_rms_norm(const OpInstance& op, bool added) {
  OperandCheck check(op, added ? 3 : 2, added ? 3 : 2);
  operands::check_norm(check, op, false, added);
  return check.support();
}

OpSupport query_rms_norm_grad(const OpInstance& op, bool added) {
  const auto [rows, columns] = matrix_of(op, 1);
  OperandCheck check(op, added ? 5 : 4, added ? 3 : 2);
  operands::check_norm_grad(check, op, false, added);
  bool sums = check.ok() && op.outputs[1].present;
  return check.support(sums ? ColumnSums::bytes(rows, columns) : 0);
}

}  // namespace

void add_rms_norm_ops(OpTable& table) {
  table["rms_norm"] = {prepare_rms_norm, [](const OpInstance& op) { return query_rms_norm(op, false); }};
  table["add_rms_norm"] = {prepare_add_rms_norm, [](const OpInstance& op) { return query_rms_norm(op, true); }};
  table["rms_norm_grad"] = {[](const OpInstance& op) { return prepare_rms_norm_grad(op, false); },
                            [](const OpInstance& op) { return query_rms_norm_grad(op, false); }};
  table["rms_norm_grad_add"] = {[](const OpInstance& op) { return prepare_rms_norm_grad(op, true); },
                                [](const OpInstance& op) { return query_rms_norm_grad(op, true); }};
}

void add_norm_ops(OpTable& table) {
  add_rms_norm_ops(table);
  add_layer_norm_ops(table);
  add_head_norm_ops(table);
}

}  // namespace quern::cpu
