// Sums and maxima over ranks: (ranks, n) -> (n), in rank order.

#include <algorithm>
#include <string>

#include "primitives/blocks.h"
#include "primitives/rows.h"
#include "primitives/simd.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"

namespace quern::cpu {

namespace {

enum Slot : int { kRank, kResult };

QUERN_CPU_CLONES void add_row(const float* x, std::int64_t count, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] += x[i];
}

QUERN_CPU_CLONES void add_row(const double* x, std::int64_t count, double* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] += x[i];
}

/// NaN where either is.
QUERN_CPU_CLONES void maximum_row(const float* x, std::int64_t count, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] > y[i] || x[i] != x[i] ? x[i] : y[i];
}

Launch prepare_reduce_ranks(const OpInstance& op) {
  const bool maximum = op.attributes.word("reduction") == "maximum";
  return [maximum](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &y = out[0];
    const std::int64_t count = x.columns();
    for_blocks(count, kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      const std::int64_t size = end - begin;
      if (y.dtype == DType::f64) {
        double* sum = y.as<double>() + begin;
        std::copy_n(x.as<double>() + begin, size, sum);
        for (std::int64_t rank = 1; rank < x.rows(); ++rank) add_row(x.as<double>() + rank * count + begin, size, sum);
        return;
      }
      float* result = target(y, begin, scratch(kResult, kBlockElements));
      for (std::int64_t rank = 0; rank < x.rows(); ++rank) {
        const float* values = load(x, rank * count + begin, size, scratch(kRank, kBlockElements));
        if (rank == 0)
          std::copy_n(values, size, result);
        else if (maximum)
          maximum_row(values, size, result);
        else
          add_row(values, size, result);
      }
      store(y, begin, size, result);
    });
  };
}

OpSupport query_reduce_ranks(const OpInstance& op) {
  const Matrix x = matrix_of(op, 0);
  OperandCheck check(op, 1, 1);
  check.input(0, "x", {x.rows, x.columns});
  if (!check.ok()) return check.support();
  const DType dtype = op.inputs[0].dtype;
  const std::string& reduction = op.attributes.word("reduction");
  check.output(0, "y", {x.columns}, dtype)
      .that(x.rows > 0, "without ranks")
      .that((reduction == "sum" && (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f64)) ||
                (reduction == "maximum" && dtype == DType::f32),
            "reduction: found " + reduction + " of " + std::string(name_of(dtype)) +
                ", expected sum of f32, bf16 or f64, or maximum of f32");
  return check.support();
}

}  // namespace

void add_reduction_ops(OpTable& table) { table["reduce_ranks"] = {prepare_reduce_ranks, query_reduce_ranks}; }

}  // namespace quern::cpu
