// Observations against their definition, over every layout of scales.
#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include "quern/block_scales.h"
#include "quern/numeric.h"
#include "quern/step_state.h"
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

namespace {

PoisonedTensor observation() { return {DType::u32, {kScaleObservationWords}}; }
const ScaleObservation& seen_of(const PoisonedTensor& tensor) { return *tensor.view().as<ScaleObservation>(); }

Attributes how(DType format, const char* layout) {
  return {{"format", std::string(name_of(format))}, {"layout", std::string(layout)}};
}

/// Of x with a wide spread, quantized by `kind`: counted from the quantized values themselves.
void check_against_codes(const std::string& kind, DType format, const char* layout, bool by_columns,
                         const Attributes& attributes) {
  CAPTURE(kind);
  CAPTURE(layout);
  const std::int64_t rows = 150, columns = 270;
  auto x = normal(DType::f32, {rows, columns}, 5, 0, 1);
  for (std::int64_t i = 0; i < rows * columns; ++i)
    x.view().as<float>()[i] *= std::exp2(static_cast<float>(i % 37) - 20.0f);
  const Extents turned{columns, rows}, plain{rows, columns};
  PoisonedTensor q(format, by_columns ? turned : plain);
  PoisonedTensor scale(DType::f32, scale_extents(*scale_layout_named(layout), rows, columns));
  std::vector<View> outputs = {q.view(), scale.view()};
  if (kind == "quantize") outputs.push_back(absent(format, turned));
  if (kind == "quantize_blocks") {
    outputs.push_back(absent(format, turned));
    outputs.push_back(
        absent(DType::f32, by_columns ? row_block_scales(rows, columns) : column_block_scales(rows, columns)));
    if (by_columns) std::swap(outputs[0], outputs[2]), std::swap(outputs[1], outputs[3]);
    if (by_columns) outputs[0] = absent(format, plain);
  }
  TestOp{kind, {x.view()}, outputs, attributes}.run();
  auto seen = observation();
  TestOp{"observe_scale", {x.view(), scale.view()}, {seen.view()}, how(format, layout)}.run();

  const std::vector<float> values = x.floats(), codes = q.floats(), scales = scale.floats();
  std::uint64_t underflowed = 0;
  float amax = 0, largest = 0, smallest = INFINITY;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) {
      const float value = values[static_cast<std::size_t>(r * columns + c)];
      const float code = codes[static_cast<std::size_t>(by_columns ? c * rows + r : r * columns + c)];
      underflowed += value != 0 && code == 0;
      amax = std::max(amax, std::fabs(value));
      const float of = scales[static_cast<std::size_t>(scale_index(*scale_layout_named(layout), r, c, rows, columns))];
      largest = std::max(largest, of), smallest = std::min(smallest, of);
    }
  CHECK(underflowed > 0);
  CHECK(seen_of(seen).underflowed == underflowed);
  CHECK(seen_of(seen).elements == static_cast<std::uint64_t>(rows * columns));
  CHECK(seen_of(seen).clipped == 0);
  CHECK(seen_of(seen).amax == amax);
  CHECK(seen_of(seen).largest_scale == largest);
  CHECK(seen_of(seen).smallest_scale == smallest);
}

}  // namespace

TEST_CASE("an observation counts the values that became zero, under every layout of scales") {
  for (DType format : {DType::e4m3, DType::e5m2, DType::i8}) {
    const Attributes in{{"format", std::string(name_of(format))}};
    check_against_codes("quantize", format, "tensor", false, in);
    check_against_codes("quantize_rows", format, "rows", false, in);
    check_against_codes("quantize_columns", format, "columns", true, in);
    if (format == DType::i8) continue;
    check_against_codes("quantize_blocks", format, "row_blocks", false, in);
    check_against_codes("quantize_blocks", format, "column_blocks", true, in);
  }
}

TEST_CASE("the layout of square blocks is quantize_blocks's") {
  const std::int64_t rows = 130, columns = 700;
  auto x = normal(DType::bf16, {rows, columns}, 5, 0, 1);
  PoisonedTensor q(DType::e4m3, {rows, columns}), scale(DType::f32, square_scales(rows, columns));
  TestOp{
      "quantize_blocks",
      {x.view()},
      {q.view(), scale.view(), absent(DType::e4m3, {columns, rows}), absent(DType::f32, square_scales(columns, rows))},
      {{"format", std::string("e4m3")}, {"square", std::int64_t{1}}}}
      .run();
  auto seen = observation();
  TestOp{"observe_scale", {x.view(), scale.view()}, {seen.view()}, how(DType::e4m3, "squares")}.run();
  std::uint64_t zeros = 0;
  const std::vector<float> values = x.floats(), codes = q.floats();
  for (std::size_t i = 0; i < values.size(); ++i) zeros += values[i] != 0 && codes[i] == 0;
  CHECK(seen_of(seen).underflowed == zeros);
  CHECK(seen_of(seen).largest_scale < 1.0f);  // the padding is ones
}

TEST_CASE("under a delayed scale, clipped is what lay beyond the scale that was assumed") {
  constexpr std::int64_t kHistory = 1;
  PoisonedTensor state(DType::f32, {kScaleStateWords + kHistory},
                       std::vector<float>(static_cast<std::size_t>(kScaleStateWords + kHistory), 0.0f));
  PoisonedTensor q(DType::e4m3, {1, 4}), scale(DType::f32, {1});
  auto seen = observation();
  auto launch = [&](std::vector<float> values, bool add) {
    PoisonedTensor x(DType::f32, {1, 4}, std::move(values));
    TestOp{"quantize_delayed",
           {x.view(), state.view()},
           {q.view(), scale.view(), absent(DType::e4m3, {4, 1})},
           {{"format", std::string("e4m3")}, {"history", kHistory}}}
        .run();
    TestOp observe{"observe_scale", {x.view(), scale.view(), state.view()}, {seen.view()}, how(DType::e4m3, "tensor")};
    observe.accumulate = add;
    observe.run();
  };
  launch({448.0f, 1e-5f, 0.0f, NAN}, false);  // scale 1: the second is below half of the smallest, 2^-9
  CHECK(seen_of(seen).underflowed == 1);
  CHECK(seen_of(seen).elements == 4);
  CHECK(seen_of(seen).clipped == 0);  // nothing was assumed
  CHECK(seen_of(seen).amax == 448.0f);
  CHECK(seen_of(seen).non_finite == 1);
  launch({500.0f, -600.0f, 0.0f, 1.0f}, true);
  CHECK(seen_of(seen).clipped == 2);
  CHECK(seen_of(seen).elements == 8);
  CHECK(seen_of(seen).largest_scale == 2.0f);
  CHECK(seen_of(seen).smallest_scale == 1.0f);
  launch({500.0f, -600.0f, 0.0f, 1.0f}, true);  // fits now
  CHECK(seen_of(seen).clipped == 2);
}

TEST_CASE("values that are not finite, or have such a scale, count as nothing else") {
  PoisonedTensor x(DType::f32, {2, 3}, std::vector<float>{INFINITY, 1.0f, NAN, 1e-30f, 2.0f, 0.0f});
  PoisonedTensor scale(DType::f32, {2}, std::vector<float>{NAN, 0x1p-7f});
  for (DType format : {DType::e4m3, DType::e5m2, DType::i8}) {
    auto seen = observation();
    TestOp{"observe_scale", {x.view(), scale.view()}, {seen.view()}, how(format, "rows")}.run();
    CHECK(seen_of(seen).non_finite == 3);
    CHECK(seen_of(seen).elements == 6);
    CHECK(seen_of(seen).amax == 2.0f);
    CHECK(seen_of(seen).largest_scale == 0x1p-7f);
    CHECK(seen_of(seen).underflowed == 1);
    CHECK(seen_of(seen).clipped == (format == DType::i8 ? 1 : 0));
  }
}

TEST_CASE("operands that do not fit are refused") {
  auto refusal = [](Extents scale, const char* layout, Extents seen) {
    PoisonedTensor x(DType::f32, {4, 6}), s(DType::f32, std::move(scale)), o(DType::u32, std::move(seen));
    return TestOp{"observe_scale", {x.view(), s.view()}, {o.view()}, how(DType::e4m3, layout)}.refusal();
  };
  CHECK(refusal({1}, "tensor", {16}) == "");
  CHECK(refusal({6}, "rows", {16}).find("do not fit") != std::string::npos);
  CHECK(refusal({6}, "diagonals", {16}).find("unknown layout") != std::string::npos);
  CHECK(refusal({1}, "tensor", {4}).find("u32 (16)") != std::string::npos);
}
