// What Muon is made of beside matmuls: the momentum's direction, of a part's rows; stacks of such matrices, each
// divided by its norm; factors of their rows; and the step along the orthogonal matrix (Jordan et al., "Muon", 2024).

#include <algorithm>
#include <cmath>
#include <vector>

#include "optimizer/update.h"
#include "primitives/blocks.h"
#include "primitives/rows.h"
#include "primitives/simd.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

enum Slot : int { kX, kState = 2, kResult };  // scratch; store_stochastic has 1
constexpr double kLeastNorm = 1e-7, kLeastRoot = 1e-10;

/// Elements of the whole that a part has.
struct Part {
  explicit Part(const OpInstance& op, const Operand& whole)
      : first(op.attributes.integer("first") * whole.extents[1]),
        count(op.attributes.integer("rows") * whole.extents[1]) {}
  std::int64_t first, count;
};

QUERN_CPU_CLONES void weighted(const float* a, float of_a, const float* b, float of_b, std::int64_t count, float* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) to[i] = of_a * a[i] + of_b * b[i];
}

// update, step, gradient (n, c), momentum (n, c) -> momentum, direction (rows, c): m = momentum m + (1 - momentum) g,
// and m, or momentum m + (1 - momentum) g again
Launch prepare_direction(const OpInstance& op) {
  return [part = Part(op, op.inputs[3]), attributes = op.attributes](std::span<const View> in,
                                                                     std::span<const View> out, const Exec&) {
    const UpdateState update = read<UpdateState>(in[0]);
    const StepState state = read<StepState>(in[1]);
    need_in_place("muon_direction", in[3], out[0]);
    const auto momentum = static_cast<float>(attributes.real("momentum"));
    const float of_gradient = (1.0f - momentum) * update.gradient_scale;
    const bool nesterov = attributes.integer("nesterov") != 0;
    const RandomKey key{seed_of(state), RandomPurpose::round_moment1,
                        static_cast<std::uint32_t>(attributes.list("objects")[0])};
    const auto offset = static_cast<std::uint64_t>(attributes.list("offsets")[0]);
    for_blocks(part.count, kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      const std::int64_t at = part.first + begin, count = end - begin;
      float *space = scratch(kState, count), *result = target(out[1], begin, scratch(kResult, count));
      if (update.apply == 0) {
        std::fill_n(result, count, 0.0f);
        return store(out[1], begin, count, result);
      }
      const float* gradient = load(in[2], at, count, scratch(kX, count));
      float* fresh = target(out[0], at, space);
      weighted(load(in[3], at, count, space), momentum, gradient, of_gradient, count, fresh);
      if (nesterov)
        weighted(fresh, momentum, gradient, of_gradient, count, result);
      else
        std::copy_n(fresh, count, result);
      store(out[1], begin, count, result);
      store_stochastic(out[0], at, count, fresh, key, state.step, offset);
    });
  };
}

// squares (n) f64, x (r, c) n times -> (n, r, c): x / max(root of the square, 1e-7)
Launch prepare_over_norm(const OpInstance&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec&) {
    for (std::size_t i = 1; i < in.size(); ++i) {
      const View &x = in[i], &stack = out[0];
      const auto factor = static_cast<float>(1.0 / std::max(std::sqrt(in[0].as<double>()[i - 1]), kLeastNorm));
      const std::int64_t first = static_cast<std::int64_t>(i - 1) * x.count();
      for_blocks(x.count(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        const float* values = load(x, begin, end - begin, scratch(kX, kBlockElements));
        float* y = target(stack, first + begin, scratch(kResult, kBlockElements));
        weighted(values, factor, values, 0.0f, end - begin, y);
        store(stack, first + begin, end - begin, y);
      });
    }
  };
}

// update, step, moment2 (n, 1), stack (any, rows, c) -> moment2, factors (rows): of q the rows' squares,
// v = beta v + (1 - beta) q / c, s = 1 / (root of v + 1e-10), and s times the root of sum q over sum q s^2
Launch prepare_row_factors(const OpInstance& op) {
  return [attributes = op.attributes](std::span<const View> in, std::span<const View> out, const Exec&) {
    need_in_place("row_factors", in[2], out[0]);
    const std::int64_t rows = in[3].extents[1], columns = in[3].extents[2];
    auto *moment = out[0].as<float>() + attributes.integer("first"), *factors = out[1].as<float>();
    std::fill_n(factors, rows, 0.0f);
    if (read<UpdateState>(in[0]).apply == 0) return;
    const double beta = attributes.real("beta");
    const std::int64_t first = attributes.integer("index") * rows * columns;
    std::vector<double> squares(static_cast<std::size_t>(rows));
    for_blocks(rows, 1, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const float* x = load(in[3], first + row * columns, columns, scratch(kX, columns));
        double square = 0;
        for (std::int64_t i = 0; i < columns; ++i) square += static_cast<double>(x[i]) * x[i];
        squares[static_cast<std::size_t>(row)] = square;
        moment[row] = static_cast<float>(beta * moment[row] + (1 - beta) * square / static_cast<double>(columns));
        factors[row] = static_cast<float>(1 / (std::sqrt(static_cast<double>(moment[row])) + kLeastRoot));
      }
    });
    double before = 0, after = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const double square = squares[static_cast<std::size_t>(row)], factor = factors[row];
      before += square, after += square * factor * factor;
    }
    const auto length = static_cast<float>(after > 0 ? std::sqrt(before / after) : 0);
    for (std::int64_t row = 0; row < rows; ++row) factors[row] *= length;
  };
}

// update, step, master (n, c), stack (any, rows, c), factors? (rows) -> master: shrunk by rate * weight_decay, less
// rate * factor * the stack's matrix, of which rows are multiplied by factors first
Launch prepare_apply(const OpInstance& op) {
  return [part = Part(op, op.inputs[2]), attributes = op.attributes](std::span<const View> in,
                                                                     std::span<const View> out, const Exec&) {
    const UpdateState update = read<UpdateState>(in[0]);
    const StepState state = read<StepState>(in[1]);
    need_in_place("muon_apply", in[2], out[0]);
    if (update.apply == 0) return;
    const double rate = state.learning_rate * attributes.real_or("rate", 1.0);
    const auto keep = static_cast<float>(1 - rate * attributes.real("weight_decay"));
    const auto along = static_cast<float>(-rate * attributes.real("factor"));
    const RandomKey key{seed_of(state), RandomPurpose::round_master,
                        static_cast<std::uint32_t>(attributes.list("objects")[0])};
    const auto offset = static_cast<std::uint64_t>(attributes.list("offsets")[0]);
    const std::int64_t first = attributes.integer("index") * part.count;
    for_blocks(part.count, kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      const std::int64_t at = part.first + begin, count = end - begin;
      float* space = scratch(kState, count);
      const float* direction = load(in[3], first + begin, count, scratch(kX, count));
      if (in.size() > 4) {
        float* rows = scratch(kResult, count);
        for (std::int64_t i = 0; i < count; ++i)
          rows[i] = direction[i] * in[4].as<float>()[(begin + i) / in[3].extents[2]];
        direction = rows;
      }
      float* fresh = target(out[0], at, space);
      weighted(load(in[2], at, count, space), keep, direction, along, count, fresh);
      store_stochastic(out[0], at, count, fresh, key, state.step, offset);
    });
  };
}

template <void (*kCheck)(operands::OperandCheck&, const OpInstance&)>
OpSupport query(const OpInstance& op, std::size_t inputs, std::size_t outputs) {
  OperandCheck check(op, inputs, outputs);
  kCheck(check, op);
  return check.support();
}

}  // namespace

void add_muon_ops(OpTable& table) {
  table["muon_direction"] = {prepare_direction,
                             [](const OpInstance& op) { return query<operands::check_muon_direction>(op, 4, 2); }};
  table["over_norm"] = {prepare_over_norm,
                        [](const OpInstance& op) { return query<operands::check_over_norm>(op, op.inputs.size(), 1); }};
  table["muon_apply"] = {prepare_apply, [](const OpInstance& op) {
                           return query<operands::check_muon_apply>(op, op.inputs.size() > 4 ? 5 : 4, 1);
                         }};
  table["row_factors"] = {prepare_row_factors,
                          [](const OpInstance& op) { return query<operands::check_row_factors>(op, 4, 2); }};
}

}  // namespace quern::cpu
