// quantize_blocks against its definition: row, column and tile scales, their layout, and values quantized by them.
#include <algorithm>
#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include "quern/block_scales.h"
#include "quern/numeric.h"
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

namespace {

struct Blocks {
  PoisonedTensor q, scale, t, t_scale;
};

Blocks quantized(const PoisonedTensor& x, DType format, bool square, const char* kind = "quantize_blocks") {
  const std::int64_t rows = x.view().extents[0], columns = x.view().extents[1];
  Blocks made{PoisonedTensor(format, {rows, columns}),
              PoisonedTensor(DType::f32, square ? square_scales(rows, columns) : row_block_scales(rows, columns)),
              PoisonedTensor(format, {columns, rows}),
              PoisonedTensor(DType::f32, square ? square_scales(columns, rows) : column_block_scales(rows, columns))};
  TestOp{kind,
         {x.view()},
         {made.q.view(), made.scale.view(), made.t.view(), made.t_scale.view()},
         {{"format", std::string(name_of(format))}, {"square", std::int64_t{square}}}}
      .run(2);
  return made;
}

struct Matrix {
  std::vector<float> values;
  std::int64_t rows, columns;
  float at(std::int64_t r, std::int64_t c) const { return values[static_cast<std::size_t>(r * columns + c)]; }
};

/// The scale that holds for an element: of the `height` x 128 block that it is in.
float scale_at(const Matrix& x, std::int64_t row, std::int64_t column, std::int64_t height, DType format) {
  const std::int64_t top = row / height * height, left = column / 128 * 128;
  float amax = 0;
  for (std::int64_t r = top; r < std::min(x.rows, top + height); ++r)
    for (std::int64_t c = left; c < std::min(x.columns, left + 128); ++c)
      if (std::fabs(x.at(r, c)) > amax) amax = std::fabs(x.at(r, c));
  return format_scale(amax, format);
}

/// Every scale and quantized value of x, in blocks of `height` x 128; scales are at [b][r], or [block row][b].
void check_form(const Matrix& x, std::int64_t height, DType format, const std::vector<float>& codes,
                const std::vector<float>& scales) {
  const std::int64_t stride = height == 1 ? x.rows : square_scales(x.rows, x.columns)[1];
  for (std::int64_t r = 0; r < x.rows; ++r)
    for (std::int64_t c = 0; c < x.columns; ++c) {
      const float want = scale_at(x, r, c, height, format);
      const std::int64_t at = height == 1 ? c / 128 * stride + r : r / 128 * stride + c / 128;
      const float scale = scales[static_cast<std::size_t>(at)],
                  code = codes[static_cast<std::size_t>(r * x.columns + c)];
      const float want_code = round_to(format, x.at(r, c) / want);
      if (scale == want && code == want_code) continue;
      FAIL("element (" << r << ", " << c << "): scale " << scale << ", want " << want << "; code " << code << ", want "
                       << want_code);
    }
}

/// Scales [blocks][lines] against tile scales, [blocks of lines][blocks].
void check_spread(const PoisonedTensor& spread, const Extents& size, const PoisonedTensor& squares) {
  const std::vector<float> scales = spread.floats(), want = squares.floats();
  const std::int64_t stride = squares.view().extents[1];
  for (std::int64_t block = 0; block < size[0]; ++block)
    for (std::int64_t line = 0; line < size[1]; ++line)
      REQUIRE(scales[static_cast<std::size_t>(block * size[1] + line)] ==
              want[static_cast<std::size_t>(line / 128 * stride + block)]);
  CHECK(std::all_of(scales.begin() + size[0] * size[1], scales.end(), [](float value) { return value == 0; }));
}

Matrix transposed(const Matrix& x) {
  Matrix t{std::vector<float>(x.values.size()), x.columns, x.rows};
  for (std::int64_t r = 0; r < x.rows; ++r)
    for (std::int64_t c = 0; c < x.columns; ++c) t.values[static_cast<std::size_t>(c * x.rows + r)] = x.at(r, c);
  return t;
}

}  // namespace

TEST_CASE("quantize_blocks has one scale for 128 elements of a row, of a column, or of both") {
  for (DType format : {DType::e4m3, DType::e5m2})
    for (DType from : {DType::f32, DType::bf16})
      for (Extents extents : {Extents{1, 1}, Extents{3, 129}, Extents{130, 7}, Extents{256, 128}, Extents{259, 300}}) {
        CAPTURE(name_of(format));
        CAPTURE(to_string(extents));
        auto x = normal(from, extents, 3, 0, 0.01);
        const Matrix values{x.floats(), extents[0], extents[1]};
        const Blocks lines = quantized(x, format, false);
        check_form(values, 1, format, lines.q.floats(), lines.scale.floats());
        check_form(transposed(values), 1, format, lines.t.floats(), lines.t_scale.floats());
        const std::vector<float> t_scales = lines.t_scale.floats();
        CHECK(std::all_of(t_scales.begin() + scale_blocks(extents[0]) * extents[1], t_scales.end(),
                          [](float value) { return value == 0; }));
        const Blocks squares = quantized(x, format, true);
        check_form(values, 128, format, squares.q.floats(), squares.scale.floats());
        check_form(transposed(values), 128, format, squares.t.floats(), squares.t_scale.floats());
        const Blocks spread = quantized(x, format, false, "quantize_squares");
        CHECK(spread.q.floats() == squares.q.floats());
        CHECK(spread.t.floats() == squares.t.floats());
        check_spread(spread.scale, row_block_scales(extents[0], extents[1]), squares.scale);
        check_spread(spread.t_scale, {scale_blocks(extents[0]), extents[1]}, squares.t_scale);
        const std::int64_t across = scale_blocks(extents[1]), stride = square_scales(extents[0], extents[1])[1];
        for (std::int64_t i = across; i < stride; ++i) CHECK(squares.scale.floats()[static_cast<std::size_t>(i)] == 1);
      }
}

TEST_CASE("quantize_blocks: zeros have scale 1, a NaN stays, an infinity makes its own blocks' scales NaN") {
  std::vector<float> values(2 * 256, 0.0f);
  values[3] = NAN, values[4] = 448.0f;  // row 0, block 0
  values[256 + 130] = INFINITY;         // row 1, block 1
  const Blocks lines = quantized(PoisonedTensor(DType::f32, {2, 256}, values), DType::e4m3, false);
  const std::vector<float> scale = lines.scale.floats(), t_scale = lines.t_scale.floats();
  CHECK(scale[0] == 1.0f);
  CHECK(scale[1] == 1.0f);
  CHECK(scale[2] == 1.0f);
  CHECK(std::isnan(scale[3]));
  CHECK(std::isnan(lines.q.floats()[3]));
  CHECK(lines.q.floats()[4] == 448.0f);
  CHECK(std::isnan(t_scale[130]));
  CHECK(t_scale[3] == 1.0f);
  const Blocks squares = quantized(PoisonedTensor(DType::f32, {2, 256}, values), DType::e4m3, true);
  CHECK(squares.scale.floats()[0] == 1.0f);
  CHECK(std::isnan(squares.scale.floats()[1]));
  CHECK(std::isnan(squares.t_scale.floats()[4]));
}

TEST_CASE("quantize_blocks: unread outputs change no others") {
  auto x = normal(DType::bf16, {140, 150}, 5);
  const Blocks all = quantized(x, DType::e4m3, false);
  PoisonedTensor t(DType::e4m3, {150, 140}), t_scale(DType::f32, column_block_scales(140, 150));
  TestOp{"quantize_blocks",
         {x.view()},
         {absent(DType::e4m3, {140, 150}), absent(DType::f32, {2, 140}), t.view(), t_scale.view()},
         {{"format", std::string("e4m3")}}}
      .run();
  CHECK(t.floats() == all.t.floats());
  CHECK(t_scale.floats() == all.t_scale.floats());
}

TEST_CASE("quantize_blocks refuses what it cannot do") {
  auto x = normal(DType::f32, {3, 4}, 1);
  PoisonedTensor q(DType::i8, {3, 4}), t(DType::i8, {4, 3}), scale(DType::f32, {1, 3}), t_scale(DType::f32, {7});
  auto refusal = [&](const PoisonedTensor& codes, const PoisonedTensor& turned, const char* format) {
    return TestOp{"quantize_blocks",
                  {x.view()},
                  {codes.view(), scale.view(), turned.view(), t_scale.view()},
                  {{"format", std::string(format)}}}
        .refusal();
  };
  CHECK(refusal(q, t, "i8") == "quantize_blocks needs a format of e4m3 or e5m2");
  PoisonedTensor q8(DType::e4m3, {3, 4}), t8(DType::e4m3, {4, 3});
  CHECK(refusal(q8, q8, "e4m3") == "quantize_blocks operand t: found (3, 4), expected (4, 3)");
  CHECK(refusal(q8, t8, "e4m3") == "");
  scale = PoisonedTensor(DType::f32, {3, 1});
  CHECK(refusal(q8, t8, "e4m3") == "quantize_blocks operand scale: found (3, 1), expected (1, 3)");
}
