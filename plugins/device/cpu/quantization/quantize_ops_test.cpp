// Quantization against its definition: scales, rounding, the protocol of delayed scales, and what fused forms must
// keep.
#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include "quantization/fused_quantize.h"
#include "quern/numeric.h"
#include "quern/step_state.h"
#include "quern/testkit/independence.h"
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

namespace {

float amax_of(const std::vector<float>& values) {
  float amax = 0;
  for (float value : values) amax = std::max(amax, std::fabs(value));
  return amax;
}

std::vector<float> codes(std::vector<float> values, float scale, DType format) {
  for (float& value : values) value = round_to(format, value * (1.0f / scale));
  return values;
}

std::vector<float> transposed(const std::vector<float>& x, std::int64_t rows, std::int64_t columns) {
  std::vector<float> t(x.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c)
      t[static_cast<std::size_t>(c * rows + r)] = x[static_cast<std::size_t>(r * columns + c)];
  return t;
}

/// A state tensor with its history, all zero.
PoisonedTensor state_tensor(std::int64_t history) {
  auto words = static_cast<std::size_t>(kScaleStateWords + history);
  return {DType::f32, {kScaleStateWords + history}, std::vector<float>(words, 0.0f)};
}

ScaleState& state_of(const PoisonedTensor& tensor) { return *tensor.view().as<ScaleState>(); }

Attributes in(DType format) { return {{"format", std::string(name_of(format))}}; }

Attributes delayed(std::int64_t history, std::int64_t margin = 0) {
  return {{"format", std::string("e4m3")}, {"history", history}, {"margin", margin}};
}

}  // namespace

TEST_CASE("scales of the floating formats are the smallest powers of two that hold amax") {
  for (DType format : {DType::e4m3, DType::e5m2}) {
    for (float amax : {1e-30f, 0.003f, 1.0f, 447.9f, 448.0f, 448.1f, 57344.0f, 57345.0f, 3e30f}) {
      CAPTURE(amax);
      float scale = format_scale(amax, format);
      int exponent = 0;
      CHECK(std::frexp(scale, &exponent) == 0.5f);
      CHECK(amax <= scale * largest_of(format));
      CHECK(amax > scale / 2 * largest_of(format));
    }
    CHECK(format_scale(0, format) == 1.0f);
    CHECK(format_scale(1e-44f, format) == 0x1p-126f);
    CHECK(format_scale(3.4e38f, format) <= 0x1p126f);
    CHECK(std::isnan(format_scale(INFINITY, format)));
    CHECK(std::isnan(format_scale(NAN, format)));
  }
  CHECK(format_scale(254.0f, DType::i8) == 2.0f);
  CHECK(format_scale(0.0f, DType::i8) == 1.0f);
  CHECK(format_scale(1e-40f, DType::i8) == 0x1p-126f);
}

TEST_CASE("quantize rounds to the grid of its scale, and its transposed output is the other transposed") {
  for (DType format : {DType::e4m3, DType::e5m2, DType::i8})
    for (DType from : {DType::f32, DType::bf16})
      for (Extents extents : {Extents{1, 1}, Extents{3, 33}, Extents{70, 131}}) {
        CAPTURE(name_of(format));
        CAPTURE(to_string(extents));
        auto x = normal(from, extents, 3, 0, 0.01);
        PoisonedTensor q(format, extents), t(format, {extents[1], extents[0]}), scale(DType::f32, {1});
        TestOp{"quantize", {x.view()}, {q.view(), scale.view(), t.view()}, in(format)}.run();
        CHECK(scale.floats()[0] == format_scale(amax_of(x.floats()), format));
        std::vector<float> want = codes(x.floats(), scale.floats()[0], format);
        CHECK(testkit::mismatch(q.floats(), want, 0) == "");
        CHECK(testkit::mismatch(t.floats(), transposed(want, extents[0], extents[1]), 0) == "");
        PoisonedTensor alone(format, {extents[1], extents[0]});  // without the row-major output
        TestOp{"quantize", {x.view()}, {absent(format, extents), scale.view(), alone.view()}, in(format)}.run();
        CHECK(alone.floats() == t.floats());
        PoisonedTensor by(format, extents);
        TestOp{
            "quantize_by", {x.view(), scale.view()}, {by.view(), absent(format, {extents[1], extents[0]})}, in(format)}
            .run();
        CHECK(by.floats() == q.floats());
      }
}

TEST_CASE("quantize: zeros have scale 1, a NaN stays, an infinity makes the scale NaN") {
  PoisonedTensor q(DType::e4m3, {1, 3}), scale(DType::f32, {1});
  auto quantize = [&](std::vector<float> values) {
    PoisonedTensor x(DType::f32, {1, 3}, std::move(values));
    TestOp{"quantize", {x.view()}, {q.view(), scale.view(), absent(DType::e4m3, {3, 1})}, in(DType::e4m3)}.run();
    return scale.floats()[0];
  };
  CHECK(quantize({0.0f, -0.0f, 0.0f}) == 1.0f);
  CHECK(q.floats() == std::vector<float>{0.0f, -0.0f, 0.0f});
  CHECK(quantize({NAN, 448.0f, -1.0f}) == 1.0f);
  CHECK(std::isnan(q.floats()[0]));
  CHECK(q.floats()[1] == 448.0f);
  CHECK(std::isnan(quantize({INFINITY, 2.0f, -1.0f})));
  CHECK(quantize({1e-44f, 0.0f, -1e-44f}) == 0x1p-126f);
  for (float value : q.floats()) CHECK(std::isfinite(value));
}

TEST_CASE("i8 has no NaN: the scale of its tensor, row or column is NaN, and no other scale") {
  const Extents extents{2, 3};
  PoisonedTensor x(DType::f32, extents, std::vector<float>{1.0f, 2.0f, 3.0f, 4.0f, NAN, 127.0f});
  PoisonedTensor q(DType::i8, extents), t(DType::i8, {3, 2}), one(DType::f32, {1}), rows(DType::f32, {2}),
      columns(DType::f32, {3});
  TestOp{"quantize", {x.view()}, {q.view(), one.view(), t.view()}, in(DType::i8)}.run();
  CHECK(std::isnan(one.floats()[0]));
  TestOp{"quantize_rows", {x.view()}, {q.view(), rows.view()}}.run();
  CHECK(rows.floats()[0] == 3.0f / 127.0f);
  CHECK(std::isnan(rows.floats()[1]));
  TestOp{"quantize_columns", {x.view()}, {t.view(), columns.view()}}.run();
  CHECK(columns.floats()[0] == 4.0f / 127.0f);
  CHECK(std::isnan(columns.floats()[1]));
  CHECK(columns.floats()[2] == 1.0f);
}

TEST_CASE("a delayed scale comes from the state, and a tensor that does not fit is quantized again with its own") {
  const Extents extents{5, 7};
  auto state = state_tensor(4);
  PoisonedTensor q(DType::e4m3, extents), scale(DType::f32, {1}), t(DType::e4m3, {7, 5});
  auto launch = [&](double deviation, std::int64_t margin = 0) {
    auto x = normal(DType::f32, extents, 8, 0, deviation);
    TestOp{"quantize_delayed", {x.view(), state.view()}, {q.view(), scale.view(), t.view()}, delayed(4, margin)}.run();
    CHECK(testkit::mismatch(q.floats(), codes(x.floats(), scale.floats()[0], DType::e4m3), 0) == "");
    CHECK(t.floats() == transposed(q.floats(), 5, 7));
    return amax_of(x.floats());
  };
  auto advance = [&] { TestOp{"advance_scale", {state.view()}, {state.view()}, delayed(4)}.run(); };

  float first = launch(1.0);  // nothing is known yet
  CHECK(state_of(state).redone == 1);
  CHECK(scale.floats()[0] == format_scale(first, DType::e4m3));
  launch(0.01);  // fits: the scale stays
  CHECK(state_of(state).redone == 1);
  CHECK(scale.floats()[0] == format_scale(first, DType::e4m3));
  CHECK(state_of(state).amax == first);
  advance();
  CHECK(state_of(state).amax == 0.0f);
  CHECK(state_of(state).redone == 0);
  float large = launch(100.0, 2);  // clipped: two powers of two of room are asked for
  CHECK(state_of(state).redone == 1);
  CHECK(scale.floats()[0] == 4 * format_scale(large, DType::e4m3));
  advance();
  CHECK(state_of(state).scale == format_scale(large, DType::e4m3));
  // The large step leaves the history after four more.
  for (int step = 0; step < 4; ++step) {
    CHECK(state_of(state).scale == format_scale(large, DType::e4m3));
    launch(1.0);
    advance();
  }
  CHECK(state_of(state).scale == format_scale(first, DType::e4m3));
}

TEST_CASE("an infinity makes the delayed scale NaN and leaves no trace in the state") {
  auto state = state_tensor(2);
  PoisonedTensor q(DType::e4m3, {1, 2}), scale(DType::f32, {1});
  PoisonedTensor x(DType::f32, {1, 2}, std::vector<float>{INFINITY, 1.0f});
  TestOp{
      "quantize_delayed", {x.view(), state.view()}, {q.view(), scale.view(), absent(DType::e4m3, {2, 1})}, delayed(2)}
      .run();
  CHECK(std::isnan(scale.floats()[0]));
  CHECK(state_of(state).scale == 0.0f);
  CHECK(state_of(state).amax == 0.0f);
}

TEST_CASE("rows and columns have scales of their own") {
  auto x = normal(DType::bf16, {9, 17}, 4);
  PoisonedTensor q(DType::e4m3, {9, 17}), rows(DType::f32, {9}), t(DType::e4m3, {17, 9}), columns(DType::f32, {17});
  TestOp{"quantize_rows", {x.view()}, {q.view(), rows.view()}}.run();
  TestOp{"quantize_columns", {x.view()}, {t.view(), columns.view()}}.run();
  std::vector<float> values = x.floats();
  for (std::int64_t r = 0; r < 9; ++r) {
    std::vector<float> row(values.begin() + r * 17, values.begin() + (r + 1) * 17);
    float scale = format_scale(amax_of(row), DType::e4m3);
    CHECK(rows.floats()[static_cast<std::size_t>(r)] == scale);
    for (std::int64_t c = 0; c < 17; ++c)
      CHECK(q.floats()[static_cast<std::size_t>(r * 17 + c)] ==
            round_to(DType::e4m3, row[static_cast<std::size_t>(c)] / scale));
  }
  std::vector<float> other = transposed(values, 9, 17);
  for (std::int64_t c = 0; c < 17; ++c) {
    std::vector<float> column(other.begin() + c * 9, other.begin() + (c + 1) * 9);
    float scale = format_scale(amax_of(column), DType::e4m3);
    CHECK(columns.floats()[static_cast<std::size_t>(c)] == scale);
    for (std::int64_t r = 0; r < 9; ++r)
      CHECK(t.floats()[static_cast<std::size_t>(c * 9 + r)] ==
            round_to(DType::e4m3, column[static_cast<std::size_t>(r)] / scale));
  }
}

TEST_CASE("i4: integers up to 7 with scales of their own, which int8 matmuls sum exactly") {
  constexpr std::int64_t kRows = 9, kDepth = 34, kColumns = 5;
  const auto x = normal(DType::bf16, {kRows, kDepth}, 4), w = normal(DType::bf16, {kDepth, kColumns}, 5);
  PoisonedTensor xq(DType::i8, {kRows, kDepth}), xs(DType::f32, {kRows});
  PoisonedTensor wq(DType::i8, {kColumns, kDepth}), ws(DType::f32, {kColumns}), y(DType::f32, {kRows, kColumns});
  const Attributes format{{"format", std::string("i4")}};
  TestOp{"quantize_rows", {x.view()}, {xq.view(), xs.view()}, format}.run();
  TestOp{"quantize_columns", {w.view()}, {wq.view(), ws.view()}, format}.run();
  TestOp{"matmul",
         {xq.view(), wq.view(), absent(DType::f32, {kColumns}), xs.view(), ws.view()},
         {y.view()},
         {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}}}
      .run();
  // As NumPy has it: scale = max(abs(x), axis) / 7, q = rint(x / scale).
  auto quantized = [](const std::vector<float>& line, float scale) {
    CHECK(scale == amax_of(line) / 7.0f);
    std::vector<double> q;
    for (float value : line) q.push_back(std::nearbyint(value * (1.0f / scale)));
    return q;
  };
  const std::vector<float> rows = x.floats(), columns = transposed(w.floats(), kDepth, kColumns);
  for (std::int64_t r = 0; r < kRows; ++r) {
    const float scale_x = xs.floats()[static_cast<std::size_t>(r)];
    const std::vector<double> a = quantized({rows.begin() + r * kDepth, rows.begin() + (r + 1) * kDepth}, scale_x);
    for (std::int64_t k = 0; k < kDepth; ++k)
      CHECK(xq.floats()[static_cast<std::size_t>(r * kDepth + k)] == a[static_cast<std::size_t>(k)]);
    CHECK(*std::max_element(a.begin(), a.end()) <= 7);
    for (std::int64_t c = 0; c < kColumns; ++c) {
      const float scale_w = ws.floats()[static_cast<std::size_t>(c)];
      const std::vector<double> b =
          quantized({columns.begin() + c * kDepth, columns.begin() + (c + 1) * kDepth}, scale_w);
      double sum = 0;
      for (std::size_t k = 0; k < a.size(); ++k) sum += a[k] * b[k];
      CHECK(y.floats()[static_cast<std::size_t>(r * kColumns + c)] ==
            doctest::Approx(sum * scale_x * scale_w).epsilon(1e-6));
    }
  }
}

TEST_CASE("integers rounded stochastically are unbiased and independent, in rows and in columns") {
  for (const std::string name : {"i8", "i4"}) {
    CAPTURE(name);
    constexpr std::int64_t kRows = 300, kColumns = 700;
    const auto x = normal(DType::bf16, {kRows, kColumns}, 4);
    PoisonedTensor q(DType::i8, {kRows, kColumns}), rows(DType::f32, {kRows});
    PoisonedTensor t(DType::i8, {kColumns, kRows}), columns(DType::f32, {kColumns});
    const Attributes stochastic{{"format", name}, {"stochastic", std::int64_t{1}}};
    TestOp{"quantize_rows", {x.view()}, {q.view(), rows.view()}, stochastic}.run();
    TestOp{"quantize_columns", {x.view()}, {t.view(), columns.view()}, stochastic}.run();
    const std::vector<float> values = x.floats();
    const std::vector<float> codes[2] = {q.floats(), transposed(t.floats(), kColumns, kRows)};
    const std::vector<float> scales[2] = {rows.floats(), columns.floats()};
    std::vector<double> ups[2];  // mean 0 and variance 1
    for (std::int64_t i = 0; i < kRows * kColumns; ++i) {
      const auto at = static_cast<std::size_t>(i);
      double up[2], deviation[2];
      for (int of : {0, 1}) {
        const float scale = scales[of][of == 0 ? at / kColumns : at % kColumns];
        const float code = codes[of][at], exact = values[at] * (1.0f / scale);
        const double chance = double{exact} - std::floor(exact);
        REQUIRE((code == std::floor(exact) || code == std::ceil(exact)));
        deviation[of] = std::sqrt(chance * (1 - chance));
        up[of] = code - exact;
      }
      if (deviation[0] < 0.3 || deviation[1] < 0.3) continue;
      for (int of : {0, 1}) ups[of].push_back(up[of] / deviation[of]);
    }
    CHECK(ups[0].size() > 100'000);
    CHECK(testkit::dependence(ups[0]) == "");
    CHECK(testkit::dependence(ups[1]) == "");
    CHECK(testkit::dependence(ups[0], ups[1]) == "");
  }
}

TEST_CASE("i8 values rounded stochastically: equal values of a row differ, and a row has them wherever it stands") {
  constexpr std::int64_t kColumns = 4000;
  const Attributes stochastic{{"format", std::string("i8")}, {"stochastic", std::int64_t{1}}};
  std::vector<float> row(kColumns, 0.25f);
  row[7] = 127;
  std::vector<float> two = row;
  two.insert(two.end(), row.begin(), row.end());
  PoisonedTensor q(DType::i8, {2, kColumns}), scale(DType::f32, {2});
  TestOp{"quantize_rows", {PoisonedTensor(DType::f32, {2, kColumns}, two).view()}, {q.view(), scale.view()}, stochastic}
      .run();
  const std::vector<float> codes = q.floats();
  std::vector<double> ups;
  for (std::int64_t i = 0; i < kColumns; ++i) {
    const float code = codes[static_cast<std::size_t>(i)];
    CHECK(code == codes[static_cast<std::size_t>(i + kColumns)]);
    if (i != 7) ups.push_back((code - 0.25) / std::sqrt(0.25 * 0.75));
  }
  CHECK(codes[7] == 127);
  CHECK(testkit::dependence(ups) == "");
}

TEST_CASE("a fused form gives the bits of its parts") {
  auto gate_up = normal(DType::bf16, {6, 20}, 5);
  PoisonedTensor y(DType::bf16, {6, 10}), q(DType::e4m3, {6, 10}), scale(DType::f32, {1}), t(DType::e4m3, {10, 6});
  TestOp{"swiglu", {gate_up.view()}, {y.view()}}.run();
  TestOp{"quantize", {y.view()}, {q.view(), scale.view(), t.view()}, in(DType::e4m3)}.run();
  PoisonedTensor fused_q(DType::e4m3, {6, 10}), fused_scale(DType::f32, {1}), fused_t(DType::e4m3, {10, 6});
  TestOp{"swiglu_quantize",
         {gate_up.view()},
         {absent(DType::bf16, {6, 10}), fused_q.view(), fused_scale.view(), fused_t.view()},
         in(DType::e4m3)}
      .run();
  CHECK(fused_q.floats() == q.floats());
  CHECK(fused_t.floats() == t.floats());
  CHECK(fused_scale.floats() == scale.floats());
  CHECK(quantize_fusions().size() == 18);
}

TEST_CASE("quantization refuses what it cannot do") {
  auto x = normal(DType::f32, {3, 4}, 1);
  PoisonedTensor y(DType::f32, {3, 4}), t(DType::f32, {4, 3}), q(DType::e4m3, {3, 4}), scale(DType::f32, {1});
  PoisonedTensor short_state(DType::f32, {kScaleStateWords});
  CHECK(TestOp{"quantize", {x.view()}, {y.view(), scale.view(), t.view()}, in(DType::f32)}.refusal() ==
        "quantize needs a format of e4m3, e5m2 or i8, found f32");
  CHECK(TestOp{"quantize", {x.view()}, {q.view(), scale.view(), t.view()}, in(DType::e4m3)}.refusal() ==
        "quantize operand t: found f32, expected e4m3");
  CHECK(TestOp{"quantize_delayed",
               {x.view(), short_state.view()},
               {q.view(), scale.view(), absent(DType::e4m3, {4, 3})},
               delayed(2)}
            .refusal() == "quantize_delayed operand state: found (16), expected (18)");
}
