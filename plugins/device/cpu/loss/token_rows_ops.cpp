// Ops between tokens and rows, and a loss of a class for each row. Sums are taken in fp64, in the order of tokens and
// rows.

#include <algorithm>
#include <bit>
#include <cmath>

#include "primitives/row_math.h"
#include "primitives/rows.h"
#include "quern/error.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "runtime/support.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

using operands::TokenRows;

void copy_row(const View& from, std::int64_t from_row, const View& to, std::int64_t to_row) {
  store_row(to, to_row, load_row(from, from_row, target_row(to, to_row, scratch(0, to.columns()))));
}

// x (B (S - K), C), tokens (K, C) -> y (B S, C)
Launch prepare_prepend(const OpInstance& op) {
  return [of = TokenRows(op)](std::span<const View> in, std::span<const View> out, const Exec&) {
#pragma omp parallel for schedule(static)
    for (std::int64_t token = 0; token < of.rows * of.sequence; ++token) {
      const std::int64_t row = token / of.sequence, at = token % of.sequence;
      const bool before = at < of.count;
      copy_row(in[before ? 1 : 0], before ? at : token - (row + 1) * of.count, out[0], token);
    }
  };
}

/// Row `row` of `sum` becomes the sum of rows of x, times `factor`, or that is added to it.
template <class RowOf>
void sum_rows(const View& x, std::int64_t rows, RowOf row_of, double factor, const View& sum, std::int64_t row,
              bool add) {
  const std::int64_t columns = sum.columns();
  auto* sums = std::bit_cast<double*>(scratch(0, 2 * columns));
  float* result = scratch(1, columns);
  std::fill_n(sums, columns, 0.0);
  for (std::int64_t i = 0; i < rows; ++i) add_to_sums(load_row(x, row_of(i), result), columns, sums);
  for (std::int64_t c = 0; c < columns; ++c) sums[c] *= factor;
  round_sums(sums, columns, result);
  add ? accumulate(sum, row * columns, columns, result) : store_row(sum, row, result);
}

// dy (B S, C) -> dx (B (S - K), C), dtokens (K, C)
Launch prepare_prepend_grad(const OpInstance& op) {
  return [of = TokenRows(op), add = op.outputs[1].accumulate](std::span<const View> in, std::span<const View> out,
                                                              const Exec&) {
    const std::int64_t others = of.sequence - of.count;
#pragma omp parallel for schedule(static)
    for (std::int64_t token = 0; token < (out[0] ? of.rows * others : 0); ++token)
      copy_row(in[0], token + (token / others + 1) * of.count, out[0], token);
#pragma omp parallel for schedule(static)
    for (std::int64_t at = 0; at < (out[1] ? of.count : 0); ++at)
      sum_rows(
          in[0], of.rows, [&](std::int64_t row) { return row * of.sequence + at; }, 1, out[1], at, add);
  };
}

// x (B S, C) -> mean (B, C)
Launch prepare_row_mean(const OpInstance& op) {
  return [of = TokenRows(op)](std::span<const View> in, std::span<const View> out, const Exec&) {
#pragma omp parallel for schedule(static)
    for (std::int64_t row = 0; row < of.rows; ++row)
      sum_rows(
          in[0], of.count, [&](std::int64_t i) { return row * of.sequence + of.first + i; },
          1 / static_cast<double>(of.count), out[0], row, false);
  };
}

// dmean (B, C) -> dx (B S, C)
Launch prepare_row_mean_grad(const OpInstance& op) {
  return [of = TokenRows(op)](std::span<const View> in, std::span<const View> out, const Exec&) {
    const std::int64_t columns = out[0].columns();
    const float factor = 1 / static_cast<float>(of.count);
#pragma omp parallel for schedule(static)
    for (std::int64_t token = 0; token < of.rows * of.sequence; ++token) {
      const std::int64_t at = token % of.sequence - of.first;
      float* dx = target_row(out[0], token, scratch(0, columns));
      if (at < 0 || at >= of.count) {
        std::fill_n(dx, columns, 0.0f);
      } else {
        const float* dmean = load_row(in[0], token / of.sequence, scratch(1, columns));
        for (std::int64_t c = 0; c < columns; ++c) dx[c] = factor * dmean[c];
      }
      store_row(out[0], token, dx);
    }
  };
}

/// The log of the sum of exponentials of a row, and the row's sum.
struct RowSums {
  RowSums(const float* logits, std::int64_t classes) {
    const double largest = *std::max_element(logits, logits + classes);
    double exponentials = 0;
    for (std::int64_t k = 0; k < classes; ++k) exponentials += std::exp(logits[k] - largest), sum += logits[k];
    logsumexp = largest + std::log(exponentials);
  }
  double logsumexp = 0, sum = 0;
};

// logits (R, K), labels (R) -> loss (R) = logsumexp - (1 - smoothing) logit of the label - smoothing mean of the
// logits, and correct (R): whether the label has the first of the largest logits
Launch prepare_class_loss(const OpInstance& op) {
  return
      [smoothing = op.attributes.real("smoothing")](std::span<const View> in, std::span<const View> out, const Exec&) {
        const std::int64_t classes = in[0].columns();
        check_indices(in[1], -1, classes, "labels");
        for (std::int64_t row = 0; row < in[0].rows(); ++row) {
          const std::int32_t label = in[1].as<std::int32_t>()[row];
          const float* logits = load_row(in[0], row, scratch(0, classes));
          const RowSums of(logits, classes);
          const double wanted =
              label < 0 ? 0 : (1 - smoothing) * logits[label] + smoothing / static_cast<double>(classes) * of.sum;
          if (out[0]) out[0].as<float>()[row] = label < 0 ? 0.0f : static_cast<float>(of.logsumexp - wanted);
          if (out[1])
            out[1].as<float>()[row] = std::max_element(logits, logits + classes) - logits == label ? 1.0f : 0.0f;
        }
      };
}

// dloss (R), logits (R, K), labels (R) -> dlogits (R, K) = dloss (softmax - target)
Launch prepare_class_loss_grad(const OpInstance& op) {
  return [smoothing = op.attributes.real("smoothing")](std::span<const View> in, std::span<const View> out,
                                                       const Exec&) {
    const std::int64_t classes = in[1].columns();
    check_indices(in[2], -1, classes, "labels");
    for (std::int64_t row = 0; row < in[1].rows(); ++row) {
      const std::int32_t label = in[2].as<std::int32_t>()[row];
      const float* logits = load_row(in[1], row, scratch(0, classes));
      const RowSums of(logits, classes);
      const double dloss = label < 0 ? 0.0 : double{in[0].as<float>()[row]};
      float* gradient = scratch(1, classes);
      for (std::int64_t k = 0; k < classes; ++k)
        gradient[k] =
            static_cast<float>(dloss * (std::exp(logits[k] - of.logsumexp) - smoothing / static_cast<double>(classes) -
                                        (k == label ? 1 - smoothing : 0)));
      store_row(out[0], row, gradient);
    }
  };
}

Launch prepare_weigh(const OpInstance&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec&) {
    for (std::int64_t i = 0; i < in[0].count(); ++i)
      out[0].as<float>()[i] = in[0].as<float>()[i] * in[1].as<float>()[i];
  };
}

OpSupport query_weigh(const OpInstance& op) {
  OperandCheck check(op, 2, 1);
  check.input(0, "x", extents_of(op, 0), DType::f32).input(1, "factors", extents_of(op, 0), DType::f32);
  return check.output(0, "y", extents_of(op, 0), DType::f32).support();
}

}  // namespace

void add_token_rows_ops(OpTable& table) {
  auto add = [&table](const char* kind, Launch (*prepare)(const OpInstance&), std::size_t inputs, std::size_t outputs) {
    table[kind] = {prepare, [=](const OpInstance& op) {
                     return operands::check_token_rows(OperandCheck(op, inputs, outputs), op).support();
                   }};
  };
  add("prepend", prepare_prepend, 2, 1);
  add("prepend_grad", prepare_prepend_grad, 1, 2);
  add("row_mean", prepare_row_mean, 1, 1);
  add("row_mean_grad", prepare_row_mean_grad, 1, 1);
  table["class_loss"] = {prepare_class_loss, [](const OpInstance& op) {
                           return operands::check_class_loss(OperandCheck(op, 2, 2), op).support();
                         }};
  table["class_loss_grad"] = {prepare_class_loss_grad, [](const OpInstance& op) {
                                return operands::check_class_loss(OperandCheck(op, 3, 1), op).support();
                              }};
  table["weigh"] = {prepare_weigh, query_weigh};
}

}  // namespace quern::cpu
