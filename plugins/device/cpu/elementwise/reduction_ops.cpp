// Sums and maxima over ranks, (ranks, n) -> (n), one of which may be elsewhere, and sums over micro-batches. A tree
// adds neighbours first, then pairs of these, and so on: partial sum `level` is of 2^level of them, as the bits of a
// counter are.

#include <algorithm>
#include <bit>
#include <string>

#include "primitives/blocks.h"
#include "primitives/rows.h"
#include "primitives/simd.h"
#include "quern/step_state.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

enum Slot : int { kRank, kResult, kPartials };

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

/// Adds the partial sums that number `at` of a tree completes, or all there are if it is the `last`, to `sum`. Returns
/// the level of the sum then in `sum`. Partial sum l begins at partials + l * stride.
template <class T>
int add_partials(std::uint32_t at, bool last, const T* partials, std::int64_t stride, std::int64_t count, T* sum) {
  int level = 0;
  for (; at >> level != 0; ++level) {
    if ((at >> level & 1) != 0)
      add_row(partials + level * stride, count, sum);
    else if (!last)
      break;
  }
  return level;
}

/// Rows of x in a tree. `partials` has kBlockElements for each level.
template <class T>
void sum_rows_in_tree(const View& x, std::int64_t begin, std::int64_t size, T* partials, T* result) {
  const auto rows = static_cast<std::uint32_t>(x.rows());
  for (std::uint32_t row = 0; row < rows; ++row) {
    std::copy_n(x.as<T>() + row * x.columns() + begin, size, result);
    const int level = add_partials(row, row + 1 == rows, partials, kBlockElements, size, result);
    if (row + 1 < rows) std::copy_n(result, size, partials + level * kBlockElements);
  }
}

template <class T>
Launch reduce_in_tree(std::int64_t ranks) {
  const auto levels = static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(ranks)));
  return [levels](std::span<const View> in, std::span<const View> out, const Exec&) {
    for_blocks(in[0].columns(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      auto* partials = reinterpret_cast<T*>(scratch(kPartials, levels * kBlockElements * sizeof(T) / sizeof(float)));
      sum_rows_in_tree(in[0], begin, end - begin, partials, out[0].as<T>() + begin);
    });
  };
}

template <class T>
void fold(std::uint32_t at, bool last, const View& sum, const View& partials) {
  for_blocks(sum.count(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    T *total = sum.as<T>() + begin, *first = partials.as<T>() + begin;
    const std::int64_t size = end - begin;
    T* result = total;  // but for the last one `sum` stays as it is
    if (!last) {
      result = reinterpret_cast<T*>(scratch(kResult, 2 * kBlockElements));
      std::copy_n(total, size, result);
    }
    const int level = add_partials(at, last, first, sum.count(), size, result);
    if (!last) std::copy_n(result, size, first + level * sum.count());
  });
}

// step (16) u32, of each tensor this micro-batch's (n) and partial sums (levels, n), f32 or f64 -> the same, in place
Launch prepare_sum_tree(const OpInstance& op) {
  const auto block = static_cast<std::uint32_t>(op.attributes.integer("block"));
  const auto count = static_cast<std::uint32_t>(op.attributes.integer("count"));
  return [=](std::span<const View> in, std::span<const View>, const Exec&) {
    const std::uint32_t micro_step = in[0].as<StepState>()->micro_step, at = micro_step % block;
    const bool last = at + 1 == block || micro_step + 1 == count;
    for (std::size_t i = 1; i + 1 < in.size(); i += 2)
      in[i].dtype == DType::f64 ? fold<double>(at, last, in[i], in[i + 1]) : fold<float>(at, last, in[i], in[i + 1]);
  };
}

Launch prepare_reduce_ranks(const OpInstance& op) {
  if (op.attributes.word("reduction") == "tree")
    return op.inputs[0].dtype == DType::f64 ? reduce_in_tree<double>(op.inputs[0].extents[0])
                                            : reduce_in_tree<float>(op.inputs[0].extents[0]);
  const bool maximum = op.attributes.word("reduction") == "maximum";
  const std::int64_t own = op.inputs.size() > 1 ? op.attributes.integer("own") : -1;
  return [maximum, own](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &y = out[0];
    const std::int64_t count = x.columns();
    for_blocks(count, kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      const std::int64_t size = end - begin;
      auto first = [&](std::int64_t rank) { return rank == own ? begin : rank * count + begin; };
      if (y.dtype == DType::f64) {
        auto* sum = reinterpret_cast<double*>(scratch(kResult, 2 * kBlockElements));
        for (std::int64_t rank = 0; rank < x.rows(); ++rank) {
          const double* values = in[rank == own].as<double>() + first(rank);
          rank == 0 ? void(std::copy_n(values, size, sum)) : add_row(values, size, sum);
        }
        std::copy_n(sum, size, y.as<double>() + begin);
        return;
      }
      float* result = scratch(kResult, kBlockElements);  // y may be where own is
      for (std::int64_t rank = 0; rank < x.rows(); ++rank) {
        const float* values = load(in[rank == own], first(rank), size, scratch(kRank, kBlockElements));
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

OpSupport query_reduce_ranks(const OpInstance& op) { return operands::check_reduce_ranks(op).support(); }

OpSupport query_sum_tree(const OpInstance& op) { return operands::check_sum_tree(op).support(); }

}  // namespace

void add_reduction_ops(OpTable& table) {
  table["reduce_ranks"] = {prepare_reduce_ranks, query_reduce_ranks};
  table["sum_tree"] = {prepare_sum_tree, query_sum_tree};
}

}  // namespace quern::cpu
