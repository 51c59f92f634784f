// matmul: y (M, N) = op(a) op(b) * scale_a * scale_b + bias, accumulated in fp32, rounded once. Operands that are not
// f32 are converted to fp32 panels in the workspace, so every format shares one GEMM, except two operands of int8,
// whose accumulators are exact. Block scales go into the panels: they are powers of two, so that rounds nothing.

#include <algorithm>
#include <cstdint>
#include <string>

#include "primitives/rows.h"
#include "primitives/simd.h"
#include "products/blas.h"
#include "products/int8_product.h"
#include "quern/block_scales.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "runtime/support.h"

namespace quern::cpu {

namespace {

enum Input : std::size_t { kA, kB, kBias, kScaleA, kScaleB };

struct Plan {
  std::int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false;
  bool row_scale = false, column_scale = false;  ///< scales are vectors, applied after the GEMM
  std::int64_t scale_rows_b = 0;                 ///< scales are of blocks: rows of b that share one
  bool accumulate = false;
  bool integers = false;                            ///< both operands are int8, and panels are of int16
  bool direct = false;                              ///< the GEMM itself writes y
  bool sum_in_y = false;                            ///< the unscaled sums may be in y
  std::int64_t panel_a = 0, panel_b = 0, sums = 0;  ///< floats of workspace
};

bool present(const OpInstance& op, std::size_t i) { return i < op.inputs.size() && op.inputs[i].present; }

Plan make_plan(const OpInstance& op) {
  const Operand &a = op.inputs[kA], &b = op.inputs[kB], &y = op.outputs[0];
  Plan plan;
  plan.transpose_a = op.attributes.integer_or("transpose_a", 0) != 0;
  plan.transpose_b = op.attributes.integer_or("transpose_b", 0) != 0;
  plan.m = a.extents[plan.transpose_a ? 1 : 0];
  plan.k = a.extents[plan.transpose_a ? 0 : 1];
  plan.n = b.extents[plan.transpose_b ? 0 : 1];
  plan.scale_rows_b = op.attributes.integer_or("scale_rows_b", 0);
  const bool blocks = plan.scale_rows_b != 0;
  plan.row_scale = !blocks && present(op, kScaleA) && op.inputs[kScaleA].count() > 1;
  plan.column_scale = !blocks && present(op, kScaleB) && op.inputs[kScaleB].count() > 1;
  plan.accumulate = y.accumulate;
  bool f32 = y.dtype == DType::f32;
  plan.integers = !blocks && a.dtype == DType::i8 && b.dtype == DType::i8;
  plan.direct = f32 && !plan.row_scale && !plan.column_scale && !plan.integers;
  plan.sum_in_y = plan.direct || (f32 && !plan.accumulate);
  plan.panel_a = a.dtype == DType::f32 && !blocks ? 0 : element_count(a.extents);
  plan.panel_b = b.dtype == DType::f32 && !blocks ? 0 : element_count(b.extents);
  if (plan.integers) {
    plan.panel_a = (int8_panel(plan.m, plan.k) + 1) / 2;
    plan.panel_b = (int8_panel(plan.n, plan.k) + 1) / 2;
  }
  plan.sums = plan.sum_in_y ? 0 : plan.m * plan.n;
  return plan;
}

void check_block_scales(OperandCheck& check, const OpInstance& op, const Plan& plan) {
  check.that(plan.scale_rows_b == 1 || plan.scale_rows_b == kScaleBlock, "needs a scale_rows_b of 1 or 128");
  check.that((!plan.transpose_a && plan.transpose_b) || op.attributes.integer_or("square_scales", 0) != 0,
             "with block scales needs K-major operands (transpose_a 0, transpose_b 1)");
  const Extents scale_b = plan.scale_rows_b == 1 ? row_block_scales(plan.n, plan.k) : square_scales(plan.n, plan.k);
  auto fits = [&op](std::size_t i, std::int64_t least) {
    return present(op, i) && op.inputs[i].dtype == DType::f32 && op.inputs[i].count() >= least;
  };
  check.that(fits(kScaleA, scale_blocks(plan.k) * plan.m) && fits(kScaleB, element_count(scale_b)),
             "needs block scales in f32 " + to_string(row_block_scales(plan.m, plan.k)) + " and " + to_string(scale_b));
}

void check_scale(OperandCheck& check, const OpInstance& op, std::size_t i, const char* name, std::int64_t vector) {
  if (!present(op, i)) return;
  const std::int64_t count = op.inputs[i].count();
  check.that(op.inputs[i].dtype == DType::f32 && (count == 1 || count == vector),
             "operand " + std::string(name) + ": needs one f32 element, or " + std::to_string(vector));
}

QUERN_CPU_CLONES void scale_row(float* row, std::int64_t count, float row_scale, const float* column_scale) {
  if (column_scale == nullptr) {
    for (std::int64_t i = 0; i < count; ++i) row[i] *= row_scale;
  } else {
    for (std::int64_t i = 0; i < count; ++i) row[i] = row[i] * row_scale * column_scale[i];
  }
}

QUERN_CPU_CLONES void add_row(float* row, std::int64_t count, const float* bias) {
  for (std::int64_t i = 0; i < count; ++i) row[i] += bias[i];
}

struct Tail {
  const float* bias = nullptr;          ///< (N)
  const float* row_scale = nullptr;     ///< (M)
  const float* column_scale = nullptr;  ///< (N)
};

/// y (+)= sums scaled, plus bias, rounded.
void finish(const Plan& plan, float* sums, const Tail& tail, const View& y) {
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < plan.m; ++row) {
    float* values = sums + row * plan.n;
    if (tail.row_scale || tail.column_scale) {
      scale_row(values, plan.n, tail.row_scale ? tail.row_scale[row] : 1.0f, tail.column_scale);
    }
    if (tail.bias) add_row(values, plan.n, tail.bias);
    if (plan.accumulate)
      accumulate(y, row * plan.n, plan.n, values);
    else
      store(y, row * plan.n, plan.n, values);
  }
}

/// y (+)= bias, so that the GEMM adds to it: one pass less than adding it afterwards.
void start_with_bias(const Plan& plan, const float* bias, const View& y) {
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < plan.m; ++row) {
    if (plan.accumulate)
      accumulate(y, row * plan.n, plan.n, bias);
    else
      store(y, row * plan.n, plan.n, bias);
  }
}

/// An operand (rows, k), or as stored (k, rows), times the scales of its blocks of `scale_rows` x 128.
const float* load_blocks(const View& x, const View& scale, std::int64_t scale_rows, bool transposed, float* panel) {
  const std::int64_t rows = x.extents[transposed ? 1 : 0], k = x.extents[transposed ? 0 : 1];
  const std::int64_t across = scale_rows == 1 ? 0 : square_scales(rows, k)[1];
  const auto* scales = scale.as<const float>();
  auto factor = [&](std::int64_t row, std::int64_t block) {
    return scales[scale_rows == 1 ? block * rows + row : row / scale_rows * across + block];
  };
#pragma omp parallel for schedule(static)
  for (std::int64_t line = 0; line < x.extents[0]; ++line) {
    const std::int64_t begin = line * x.extents[1];
    const float* values = load(x, begin, x.extents[1], panel + begin);
    for (std::int64_t i = 0; i < x.extents[1]; ++i)
      panel[begin + i] = values[i] * (transposed ? factor(i, line / kScaleBlock) : factor(line, i / kScaleBlock));
  }
  return panel;
}

/// sums (m, n) = alpha op(a) op(b), of int8 operands.
void sum_integers(const Plan& plan, float alpha, const View& a, const View& b, Workspace& workspace, float* sums) {
  auto panel = [&workspace](std::int64_t count) { return reinterpret_cast<std::int16_t*>(workspace.floats(count)); };
  auto rows = [&plan](const View& x, bool turned, std::int64_t size) {
    const auto* codes = x.as<const std::int8_t>();
    return turned ? CodeRows{codes, 1, size} : CodeRows{codes, plan.k, 1};
  };
  std::int16_t *panel_a = panel(plan.panel_a), *panel_b = panel(plan.panel_b);
  int8_product(plan.m, plan.n, plan.k, alpha, rows(a, plan.transpose_a, plan.m), rows(b, !plan.transpose_b, plan.n),
               panel_a, panel_b, sums);
}

/// The same of others, or added to `beta` times what is there.
void sum_floats(const Plan& plan, float alpha, float beta, std::span<const View> inputs, Workspace& workspace,
                float* sums) {
  float *panel_a = workspace.floats(plan.panel_a), *panel_b = workspace.floats(plan.panel_b);
  const bool blocks = plan.scale_rows_b != 0;
  const float* a =
      blocks ? load_blocks(inputs[kA], inputs[kScaleA], 1, plan.transpose_a, panel_a) : load_all(inputs[kA], panel_a);
  const float* b = blocks ? load_blocks(inputs[kB], inputs[kScaleB], plan.scale_rows_b, !plan.transpose_b, panel_b)
                          : load_all(inputs[kB], panel_b);
  auto read = [](bool transposed) { return transposed ? MatrixView::Read::transposed : MatrixView::Read::plain; };
  gemm(plan.m, plan.n, plan.k, alpha, {a, plan.transpose_a ? plan.m : plan.k, read(plan.transpose_a)},
       {b, plan.transpose_b ? plan.k : plan.n, read(plan.transpose_b)}, beta, sums, plan.n);
}

void run(const Plan& plan, std::span<const View> inputs, const View& y, const Exec& exec) {
  auto input = [&](std::size_t i) { return i < inputs.size() ? inputs[i] : View{}; };
  Workspace workspace(exec.workspace);
  float* sums = plan.sum_in_y ? y.as<float>() : workspace.floats(plan.sums);
  Tail tail;
  if (View bias = input(kBias)) tail.bias = load(bias, 0, plan.n, scratch(0, plan.n));
  float alpha = 1.0f;
  auto take_scale = [&](const View& scale, bool is_vector, const float*& vector) {
    if (!scale || plan.scale_rows_b != 0) return;
    if (is_vector)
      vector = scale.as<float>();
    else
      alpha *= *scale.as<float>();
  };
  take_scale(input(kScaleA), plan.row_scale, tail.row_scale);
  take_scale(input(kScaleB), plan.column_scale, tail.column_scale);
  if (plan.direct && tail.bias) start_with_bias(plan, tail.bias, y);
  const float beta = plan.direct && (plan.accumulate || tail.bias) ? 1.0f : 0.0f;
  if (plan.integers)
    sum_integers(plan, alpha, inputs[kA], inputs[kB], workspace, sums);
  else
    sum_floats(plan, alpha, beta, inputs, workspace, sums);
  if (!plan.direct) finish(plan, sums, tail, y);
}

OpSupport query(const OpInstance& op) {
  OperandCheck check(op, std::clamp<std::size_t>(op.inputs.size(), 2, kScaleB + 1), 1);
  const Extents a = extents_of(op, kA), b = extents_of(op, kB);
  check.that(a.size() == 2 && b.size() == 2, "multiplies matrices").input(kA, "a", a);
  if (!check.ok()) return check.support();
  const Plan plan = make_plan(op);
  check.input(kB, "b", plan.transpose_b ? Extents{plan.n, plan.k} : Extents{plan.k, plan.n});
  check.sum(0, "y", {plan.m, plan.n}, {{DType::f32, DType::bf16}, "f32 or bf16"});
  if (present(op, kBias)) check.input(kBias, "bias", {plan.n});
  check.that(!plan.integers || plan.k <= kMostInt8Sums, "of i8 may overflow with K above " +
                                                            std::to_string(kMostInt8Sums) + " elements, found " +
                                                            std::to_string(plan.k));
  if (plan.scale_rows_b != 0) {
    check_block_scales(check, op, plan);
  } else {
    check_scale(check, op, kScaleA, "scale_a", plan.m);
    check_scale(check, op, kScaleB, "scale_b", plan.n);
  }
  return check.support(float_bytes(plan.panel_a) + float_bytes(plan.panel_b) + float_bytes(plan.sums));
}

Launch prepare(const OpInstance& op) {
  return [plan = make_plan(op)](std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
    run(plan, inputs, outputs[0], exec);
  };
}

}  // namespace

void add_matmul_ops(OpTable& table) { table["matmul"] = {prepare, query}; }

}  // namespace quern::cpu
