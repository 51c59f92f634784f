// Columns of a matrix that another is added to, and the gradient of the added matrix: how adapters of parts of a packed
// matrix reach its result.

#include <algorithm>

#include "primitives/blocks.h"
#include "primitives/rows.h"
#include "primitives/simd.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

enum Slot : int { kWhole, kPart, kResult };

QUERN_CPU_CLONES void add_scaled(const float* x, std::int64_t count, float factor, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] += factor * x[i];
}

QUERN_CPU_CLONES void scaled(const float* x, std::int64_t count, float factor, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = factor * x[i];
}

struct Columns {
  explicit Columns(const OpInstance& op)
      : first(op.attributes.integer("first")), factor(static_cast<float>(op.attributes.real("factor"))) {}
  std::int64_t first;
  float factor;
};

// y (N, C), part (N, P) -> y + factor * part at columns [first, first + P)
Launch prepare_add_columns(const OpInstance& op) {
  return [c = Columns(op)](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &y = in[0], &part = in[1], &sum = out[0];
    for_blocks(y.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *y_space = scratch(kWhole, y.columns()), *part_space = scratch(kPart, part.columns());
      float* sum_space = scratch(kResult, y.columns());
      for (std::int64_t row = begin; row < end; ++row) {
        const float* values = load_row(y, row, y_space);
        float* result = target_row(sum, row, sum_space);
        if (result != values) std::copy_n(values, y.columns(), result);
        add_scaled(load_row(part, row, part_space), part.columns(), c.factor, result + c.first);
        store_row(sum, row, result);
      }
    });
  };
}

// x (N, C) -> factor * x of columns [first, first + P): (N, P)
Launch prepare_columns(const OpInstance& op) {
  return [c = Columns(op)](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &y = out[0];
    for_blocks(x.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *space = scratch(kWhole, x.columns()), *result_space = scratch(kResult, y.columns());
      for (std::int64_t row = begin; row < end; ++row) {
        float* result = target_row(y, row, result_space);
        scaled(load_row(x, row, space) + c.first, y.columns(), c.factor, result);
        store_row(y, row, result);
      }
    });
  };
}

OpSupport query_add_columns(const OpInstance& op) {
  OperandCheck check(op, 2, 1);
  operands::check_add_columns(check, op);
  return check.support();
}

OpSupport query_columns(const OpInstance& op) {
  OperandCheck check(op, 1, 1);
  operands::check_columns(check, op);
  return check.support();
}

}  // namespace

void add_columns_ops(OpTable& table) {
  table["add_columns"] = {prepare_add_columns, query_add_columns};
  table["columns"] = {prepare_columns, query_columns};
}

}  // namespace quern::cpu
