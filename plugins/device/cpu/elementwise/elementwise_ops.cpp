// Element by element: add, SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020), GELU (Hendrycks & Gimpel, 2016)
// and their gradients; scales and soft caps; and sums over tokens.

#include <cmath>
#include <string>

#include "primitives/blocks.h"
#include "primitives/row_math.h"
#include "primitives/simd.h"
#include "primitives/softmax_rows.h"
#include "quern/random.h"
#include "quern/step_state.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"

namespace quern::cpu {

namespace {

enum Slot : int { kA, kB, kY, kD };

[[gnu::always_inline]] inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

// d silu(g) / dg = sigmoid(g) * (1 + g * (1 - sigmoid(g))).
QUERN_CPU_CLONES void swiglu_row(const float* gate, const float* up, std::int64_t count, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

QUERN_CPU_CLONES void swiglu_grad_row(const float* dy, const float* gate, const float* up, std::int64_t count,
                                      float* dgate, float* dup) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float g = gate[i], s = sigmoid(g), d = dy[i];
    dgate[i] = d * up[i] * (s * (1.0f + g * (1.0f - s)));
    dup[i] = d * (g * s);
  }
}

QUERN_CPU_CLONES void swiglu_and_grad_row(const float* dy, const float* gate, const float* up, std::int64_t count,
                                          float* y, float* dgate, float* dup) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float g = gate[i], s = sigmoid(g), d = dy[i], u = up[i];
    y[i] = g * s * u;
    dgate[i] = d * u * (s * (1.0f + g * (1.0f - s)));
    dup[i] = d * (g * s);
  }
}

constexpr float kTanhScale = 1.5957691216f;  // 2 sqrt(2 / pi): (1 + tanh(u)) / 2 = sigmoid(2 u)
constexpr float kTanhCubic = 0.044715f;

QUERN_CPU_CLONES void geglu_row(const float* gate, const float* up, std::int64_t count, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float g = gate[i];
    y[i] = g * sigmoid(kTanhScale * (g + kTanhCubic * g * g * g)) * up[i];
  }
}

QUERN_CPU_CLONES void geglu_grad_row(const float* dy, const float* gate, const float* up, std::int64_t count,
                                     float* dgate, float* dup) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float g = gate[i], s = sigmoid(kTanhScale * (g + kTanhCubic * g * g * g)), d = dy[i];
    dgate[i] = d * up[i] * (s + g * s * (1.0f - s) * kTanhScale * (1.0f + 3.0f * kTanhCubic * g * g));
    dup[i] = d * (g * s);
  }
}

/// Cumulative distribution of the normal law, erfc(-x / sqrt 2) / 2. erfc's Chebyshev fit (Press et al., "Numerical
/// Recipes", 6.2) has a relative error below 1.2e-7, so small tails stay right.
[[gnu::always_inline]] inline float normal_cdf(float x) {
  float z = std::fabs(x) * 0.70710678f;
  float t = 1.0f / (1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  float tail = 0.5f * t * fast_exp(p - z * z);
  return x < 0.0f ? tail : 1.0f - tail;
}

QUERN_CPU_CLONES void gelu_erf(const float* x, std::int64_t count, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] * normal_cdf(x[i]);
}

QUERN_CPU_CLONES void gelu_tanh(const float* x, std::int64_t count, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float v = x[i];
    y[i] = v * sigmoid(kTanhScale * (v + kTanhCubic * v * v * v));
  }
}

QUERN_CPU_CLONES void gelu_erf_grad(const float* dy, const float* x, std::int64_t count, float* dx) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float v = x[i], density = 0.39894228f * fast_exp(-0.5f * v * v);
    dx[i] = dy[i] * (normal_cdf(v) + v * density);
  }
}

QUERN_CPU_CLONES void gelu_tanh_grad(const float* dy, const float* x, std::int64_t count, float* dx) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float v = x[i], s = sigmoid(kTanhScale * (v + kTanhCubic * v * v * v));
    float slope = kTanhScale * (1.0f + 3.0f * kTanhCubic * v * v);
    dx[i] = dy[i] * (s + v * s * (1.0f - s) * slope);
  }
}

Launch prepare_add(const OpInstance&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &a = in[0], &b = in[1], &y = out[0];
    for_blocks(y.count(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      std::int64_t count = end - begin;
      float* values = target(y, begin, scratch(kY, kBlockElements));
      add_rows(load(a, begin, count, scratch(kA, kBlockElements)), load(b, begin, count, scratch(kB, kBlockElements)),
               count, values);
      store(y, begin, count, values);
    });
  };
}

using GatedRow = void (*)(const float* gate, const float* up, std::int64_t count, float* y);
using GatedGradRow = void (*)(const float* dy, const float* gate, const float* up, std::int64_t count, float* dgate,
                              float* dup);

// gate_up (N, 2 F) -> y (N, F)
Launch prepare_gated(GatedRow row_function) {
  return [row_function](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &gate_up = in[0], &y = out[0];
    std::int64_t width = y.columns();
    for_blocks(y.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *space = scratch(kA, 2 * width), *y_space = scratch(kY, width);
      for (std::int64_t row = begin; row < end; ++row) {
        const float* gate = load_row(gate_up, row, space);
        float* y_row = target_row(y, row, y_space);
        row_function(gate, gate + width, width, y_row);
        store_row(y, row, y_row);
      }
    });
  };
}

// dy (N, F), gate_up (N, 2 F) -> dgate_up (N, 2 F)
Launch prepare_gated_grad(GatedGradRow row_function) {
  return [row_function](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &dy = in[0], &gate_up = in[1], &d = out[0];
    std::int64_t width = dy.columns();
    for_blocks(dy.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *space = scratch(kA, 2 * width), *dy_space = scratch(kB, width), *d_space = scratch(kD, 2 * width);
      for (std::int64_t row = begin; row < end; ++row) {
        const float* gate = load_row(gate_up, row, space);
        float* d_row = target_row(d, row, d_space);
        row_function(load_row(dy, row, dy_space), gate, gate + width, width, d_row, d_row + width);
        store_row(d, row, d_row);
      }
    });
  };
}

// gate_up (N, 2 F), dy (N, F) -> y (N, F), dgate_up (N, 2 F)
Launch prepare_swiglu_and_grad(const OpInstance&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &gate_up = in[0], &dy = in[1], &y = out[0], &d = out[1];
    std::int64_t width = dy.columns();
    for_blocks(dy.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *space = scratch(kA, 2 * width), *dy_space = scratch(kB, width);
      float *y_space = scratch(kY, width), *d_space = scratch(kD, 2 * width);
      for (std::int64_t row = begin; row < end; ++row) {
        const float* gate = load_row(gate_up, row, space);
        float *y_row = place_row(y, row, y_space), *d_row = place_row(d, row, d_space);
        swiglu_and_grad_row(load_row(dy, row, dy_space), gate, gate + width, width, y_row, d_row, d_row + width);
        if (y) store_row(y, row, y_row);
        if (d) store_row(d, row, d_row);
      }
    });
  };
}

/// y = f(x), element by element, of a function with a number of the op.
using Map = void (*)(const float* x, std::int64_t count, float number, float* y);

Launch prepare_map(Map function, double attribute) {
  return [function, number = static_cast<float>(attribute)](std::span<const View> in, std::span<const View> out,
                                                            const Exec&) {
    const View &x = in[0], &y = out[0];
    for_blocks(y.count(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float* values = target(y, begin, scratch(kY, kBlockElements));
      function(load(x, begin, end - begin, scratch(kA, kBlockElements)), end - begin, number, values);
      store(y, begin, end - begin, values);
    });
  };
}

Launch prepare_gelu(const OpInstance& op) {
  auto* row_function = op.attributes.word("approximation") == "tanh" ? gelu_tanh : gelu_erf;
  return [row_function](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &y = out[0];
    for_blocks(y.count(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float* values = target(y, begin, scratch(kY, kBlockElements));
      row_function(load(x, begin, end - begin, scratch(kA, kBlockElements)), end - begin, values);
      store(y, begin, end - begin, values);
    });
  };
}

Launch prepare_gelu_grad(const OpInstance& op) {
  auto* row_function = op.attributes.word("approximation") == "tanh" ? gelu_tanh_grad : gelu_erf_grad;
  return [row_function](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &dy = in[0], &x = in[1], &dx = out[0];
    for_blocks(dx.count(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      std::int64_t count = end - begin;
      float* values = target(dx, begin, scratch(kY, kBlockElements));
      row_function(load(dy, begin, count, scratch(kA, kBlockElements)),
                   load(x, begin, count, scratch(kB, kBlockElements)), count, values);
      store(dx, begin, count, values);
    });
  };
}

// x (N, C) -> sum (C)
Launch prepare_column_sum(const OpInstance& op) {
  bool accumulate = op.outputs[0].accumulate;
  return [accumulate](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View& x = in[0];
    std::int64_t rows = x.rows(), columns = x.columns();
    ColumnSums sums(static_cast<float*>(exec.workspace), rows, columns);
    for_blocks(rows, kBlockRows, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
      float *space = scratch(kA, columns), *partial = sums.start(block);
      for (std::int64_t row = begin; row < end; ++row) add_rows(partial, load_row(x, row, space), columns, partial);
    });
    sums.finish(out[0], accumulate);
  };
}

OpSupport query_map(const OpInstance& op) {
  OperandCheck check(op, 1, 1);
  return check.input(0, "x", extents_of(op, 0)).output(0, "y", extents_of(op, 0)).support();
}

OpSupport query_add(const OpInstance& op) {
  OperandCheck check(op, 2, 1);
  check.input(0, "a", extents_of(op, 0)).input(1, "b", extents_of(op, 0));
  return check.output(0, "y", extents_of(op, 0)).support();
}

/// gate_up's extents with half its columns.
Extents half_of(const OpInstance& op, std::size_t gate_up) {
  Extents extents = extents_of(op, gate_up);
  if (!extents.empty()) extents.back() /= 2;
  return extents;
}

void check_gate_up(OperandCheck& check, const OpInstance& op, std::size_t i) {
  check.that(matrix_of(op, i).columns % 2 == 0, "needs an even number of columns in gate_up");
  check.input(i, "gate_up", extents_of(op, i));
}

OpSupport query_gated(const OpInstance& op) {
  OperandCheck check(op, 1, 1);
  check_gate_up(check, op, 0);
  return check.output(0, "y", half_of(op, 0)).support();
}

OpSupport query_gated_grad(const OpInstance& op) {
  OperandCheck check(op, 2, 1);
  check_gate_up(check, op, 1);
  return check.input(0, "dy", half_of(op, 1)).output(0, "dgate_up", extents_of(op, 1)).support();
}

OpSupport query_swiglu_and_grad(const OpInstance& op) {
  OperandCheck check(op, 2, 2);
  check_gate_up(check, op, 0);
  check.input(1, "dy", half_of(op, 0)).output(0, "y", half_of(op, 0)).output(1, "dgate_up", extents_of(op, 0));
  return check.support();
}

OpSupport query_gelu(const OpInstance& op, bool gradient) {
  const std::string& approximation = op.attributes.word("approximation");
  OperandCheck check(op, gradient ? 2 : 1, 1);
  check.that(approximation == "erf" || approximation == "tanh",
             "approximation: found " + approximation + ", expected erf or tanh");
  check.input(0, gradient ? "dy" : "x", extents_of(op, 0)).output(0, gradient ? "dx" : "y", extents_of(op, 0));
  if (gradient) check.input(1, "x", extents_of(op, 0));
  return check.support();
}

OpSupport query_column_sum(const OpInstance& op) {
  auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, 1, 1);
  return check.input(0, "x", extents_of(op, 0)).sum(0, "sum", {columns}).support(ColumnSums::bytes(rows, columns));
}

QUERN_CPU_CLONES void drop(const float* dy, const float* x, std::int64_t first, std::int64_t count, std::uint32_t salt,
                           float probability, float* y) {
  const float factor = 1.0f / (1.0f - probability);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = __builtin_bit_cast(std::uint32_t, x[i]);
    y[i] = dropout_keeps(value, salt, static_cast<std::uint32_t>(first + i), probability) ? dy[i] * factor : 0.0f;
  }
}

// dy (any), x, step -> dx; without dy, x -> y
Launch prepare_dropout(const OpInstance& op) {
  const auto probability = static_cast<float>(op.attributes.real("probability"));
  const auto object = static_cast<std::uint32_t>(op.attributes.integer("object"));
  return [=](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &dy = in[0], &x = in[in.size() - 2], &y = out[0];
    const StepState& state = *in.back().as<StepState>();
    const std::uint64_t seed = std::uint64_t{state.seed_high} << 32 | state.seed_low;
    const std::uint32_t salt = dropout_salt(seed, object, state.step, state.micro_step);
    for_blocks(y.count(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      const std::int64_t count = end - begin;
      float* values = target(y, begin, scratch(kY, kBlockElements));
      drop(load(dy, begin, count, scratch(kA, kBlockElements)), load(x, begin, count, scratch(kB, kBlockElements)),
           begin, count, salt, probability, values);
      store(y, begin, count, values);
    });
  };
}

OpSupport query_dropout(const OpInstance& op) {
  const std::size_t inputs = op.kind == "dropout" ? 2 : 3;
  OperandCheck check(op, inputs, 1);
  for (std::size_t i = 0; i + 1 < inputs; ++i) check.input(i, i + 2 == inputs ? "x" : "dy", extents_of(op, 0));
  check.input(inputs - 1, "step", {std::int64_t{sizeof(StepState) / 4}}, DType::u32);
  return check.output(0, inputs == 2 ? "y" : "dx", extents_of(op, 0)).support();
}

}  // namespace

void add_elementwise_ops(OpTable& table) {
  table["add"] = {prepare_add, query_add};
  table["scale"] = {[](const OpInstance& op) { return prepare_map(multiply, op.attributes.real("factor")); },
                    query_map};
  table["soft_cap"] = {[](const OpInstance& op) { return prepare_map(soft_cap, op.attributes.real("cap")); },
                       query_map};
  table["swiglu"] = {[](const OpInstance&) { return prepare_gated(swiglu_row); }, query_gated};
  table["swiglu_grad"] = {[](const OpInstance&) { return prepare_gated_grad(swiglu_grad_row); }, query_gated_grad};
  table["geglu"] = {[](const OpInstance&) { return prepare_gated(geglu_row); }, query_gated};
  table["geglu_grad"] = {[](const OpInstance&) { return prepare_gated_grad(geglu_grad_row); }, query_gated_grad};
  table["swiglu_and_grad"] = {prepare_swiglu_and_grad, query_swiglu_and_grad};
  table["gelu"] = {prepare_gelu, [](const OpInstance& op) { return query_gelu(op, false); }};
  table["gelu_grad"] = {prepare_gelu_grad, [](const OpInstance& op) { return query_gelu(op, true); }};
  table["dropout"] = table["dropout_grad"] = {prepare_dropout, query_dropout};
  table["column_sum"] = {prepare_column_sum, query_column_sum};
}

}  // namespace quern::cpu
