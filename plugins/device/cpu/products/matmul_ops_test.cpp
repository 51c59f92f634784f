#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "quern/block_scales.h"
#include "quern/error.h"
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

namespace {

struct Case {
  std::int64_t m, n, k;
  DType operand = DType::f32;
  DType result = DType::f32;
  bool transpose_a = false, transpose_b = false, bias = false, accumulate = false;
  enum Scale { none, scalar, vector } scale = none;
};

std::string describe(const Case& c) {
  return std::to_string(c.m) + "x" + std::to_string(c.n) + "x" + std::to_string(c.k) + " " +
         std::string(name_of(c.operand)) + " -> " + std::string(name_of(c.result)) + (c.transpose_a ? " ta" : "") +
         (c.transpose_b ? " tb" : "") + (c.bias ? " bias" : "") + (c.accumulate ? " accumulate" : "") + " scale " +
         std::to_string(c.scale);
}

std::string check(const Case& c) {
  // int8 operands are integers; wide enough to use the grid.
  double deviation = c.operand == DType::i8 ? 20.0 : 1.0;
  auto a = normal(c.operand, c.transpose_a ? Extents{c.k, c.m} : Extents{c.m, c.k}, 1, 0, deviation);
  auto b = normal(c.operand, c.transpose_b ? Extents{c.n, c.k} : Extents{c.k, c.n}, 2, 0, deviation);
  auto bias = normal(c.result, {c.n}, 3);
  std::int64_t scales_a = c.scale == Case::vector ? c.m : 1, scales_b = c.scale == Case::vector ? c.n : 1;
  auto scale_a = normal(DType::f32, {scales_a}, 4, 0, 0.5), scale_b = normal(DType::f32, {scales_b}, 5, 0, 0.5);
  auto y = c.accumulate ? normal(c.result, {c.m, c.n}, 6) : PoisonedTensor(c.result, {c.m, c.n});
  auto da = doubles(a), db = doubles(b), dbias = doubles(bias), dsa = doubles(scale_a), dsb = doubles(scale_b);
  std::vector<double> want(static_cast<std::size_t>(c.m * c.n), 0.0);
  if (c.accumulate) want = doubles(y);
  double magnitude = 0;
  for (std::int64_t i = 0; i < c.m; ++i) {
    for (std::int64_t j = 0; j < c.n; ++j) {
      double sum = 0, absolute = 0;
      for (std::int64_t l = 0; l < c.k; ++l) {
        double product = da[static_cast<std::size_t>(c.transpose_a ? l * c.m + i : i * c.k + l)] *
                         db[static_cast<std::size_t>(c.transpose_b ? j * c.k + l : l * c.n + j)];
        sum += product;
        absolute += std::abs(product);
      }
      double scale = 1;
      if (c.scale != Case::none) {
        scale =
            dsa[static_cast<std::size_t>(scales_a > 1 ? i : 0)] * dsb[static_cast<std::size_t>(scales_b > 1 ? j : 0)];
      }
      double& element = want[static_cast<std::size_t>(i * c.n + j)];
      element += sum * scale + (c.bias ? dbias[static_cast<std::size_t>(j)] : 0.0);
      magnitude = std::max(magnitude, absolute * std::abs(scale) + 4);
    }
  }
  TestOp op{"matmul",
            {a.view(), b.view(), c.bias ? bias.view() : absent(), c.scale ? scale_a.view() : absent(),
             c.scale ? scale_b.view() : absent()},
            {y.view()},
            {{"transpose_a", std::int64_t{c.transpose_a}}, {"transpose_b", std::int64_t{c.transpose_b}}},
            {},
            c.accumulate};
  op.run();
  // Slack: sums in fp32 of k terms, each rounding relative to the running magnitude (errors add like a random walk).
  return compare(y.view(), want, magnitude * 0x1p-24 * (4 + static_cast<double>(c.k) / 8), 0);
}

}  // namespace

TEST_CASE("matmul: layouts, formats, bias, scales, accumulation at odd sizes") {
  const std::int64_t sizes[][3] = {{1, 1, 1}, {3, 7, 17}, {33, 17, 7}, {65, 1, 129}, {1, 33, 3}};
  const std::pair<DType, DType> formats[] = {{DType::f32, DType::f32},  {DType::bf16, DType::bf16},
                                             {DType::bf16, DType::f32}, {DType::e4m3, DType::bf16},
                                             {DType::e5m2, DType::f32}, {DType::i8, DType::bf16}};
  for (auto& size : sizes) {
    for (auto [operand, result] : formats) {
      for (int bits = 0; bits < 16; ++bits) {
        for (auto scale : {Case::none, Case::scalar, Case::vector}) {
          Case c{size[0],         size[1],         size[2],         operand,         result,
                 (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0, scale};
          std::string text = check(c);
          INFO(describe(c));
          CHECK(text == "");
        }
      }
    }
  }
}

TEST_CASE("matmul: mixed operand formats, and sizes beyond one block") {
  auto a = normal(DType::e4m3, {70, 130}, 1), b = normal(DType::e5m2, {130, 90}, 2);
  PoisonedTensor y(DType::f32, {70, 90}), z(DType::f32, {70, 90});
  TestOp{"matmul", {a.view(), b.view()}, {y.view()}}.run();
  PoisonedTensor a32(DType::f32, {70, 130}, a.floats()), b32(DType::f32, {130, 90}, b.floats());
  TestOp{"matmul", {a32.view(), b32.view()}, {z.view()}}.run();
  CHECK(testkit::mismatch(y.floats(), z.floats(), 0) == "");
  CHECK(check({257, 130, 300, DType::bf16, DType::bf16, true, false, false, true}) == "");
}

// Sums of more bits than fp32 has: exact in every part, rounded to y and scaled once.
TEST_CASE("matmul: int8 accumulators are exact") {
  const std::int64_t m = 6, n = 5, k = 9001;
  std::vector<float> codes_a(static_cast<std::size_t>(m * k), 127), codes_b(static_cast<std::size_t>(n * k), -127);
  for (std::int64_t i = 0; i < m; ++i) codes_a[static_cast<std::size_t>(i * k + 977 * i)] = static_cast<float>(3 * i);
  PoisonedTensor a(DType::i8, {m, k}, codes_a), b(DType::i8, {n, k}, codes_b), y(DType::f32, {m, n});
  auto scale_a = normal(DType::f32, {m}, 3), scale_b = normal(DType::f32, {n}, 4);
  TestOp{"matmul",
         {a.view(), b.view(), absent(), scale_a.view(), scale_b.view()},
         {y.view()},
         {{"transpose_b", std::int64_t{1}}}}
      .run();
  std::vector<float> want;
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j)
      want.push_back(static_cast<float>(-127 * (127 * (k - 1) + 3 * i)) *
                     scale_a.floats()[static_cast<std::size_t>(i)] * scale_b.floats()[static_cast<std::size_t>(j)]);
  CHECK(y.floats() == want);
}

TEST_CASE("matmul: with tile scales, operands need not be K-major") {
  constexpr std::int64_t kM = 130, kN = 257, kK = 300;
  auto turned = [](const PoisonedTensor& x) {
    const Extents size = x.view().extents;
    PoisonedTensor t(x.view().dtype, {size[1], size[0]});
    TestOp{"transpose", {x.view()}, {t.view()}}.run();
    return t;
  };
  const auto x = normal(DType::f32, {kM, kK}, 1), w = normal(DType::f32, {kN, kK}, 2);
  auto quantized = [](const PoisonedTensor& from, const char* kind, const Extents& scales) {
    PoisonedTensor q(DType::e4m3, from.view().extents), scale(DType::f32, scales);
    TestOp{kind,
           {from.view()},
           {q.view(), scale.view(), absent(), absent()},
           {{"format", std::string("e4m3")}, {"square", std::int64_t{1}}}}
        .run();
    return std::pair{std::move(q), std::move(scale)};
  };
  const auto [a, scale_a] = quantized(x, "quantize_squares", row_block_scales(kM, kK));
  for (const std::int64_t scale_rows : {1, 128}) {
    const auto [b, scale_b] = scale_rows == 1 ? quantized(w, "quantize_squares", row_block_scales(kN, kK))
                                              : quantized(w, "quantize_blocks", square_scales(kN, kK));
    const PoisonedTensor across_a = turned(a), across_b = turned(b);
    auto product = [&](bool of_a, bool of_b, bool squares) {
      return [&, of_a, of_b, squares](const PoisonedTensor& y) {
        return TestOp{"matmul",
                      {of_a ? across_a.view() : a.view(), of_b ? across_b.view() : b.view(), absent(), scale_a.view(),
                       scale_b.view()},
                      {y.view()},
                      {{"transpose_a", std::int64_t{of_a}},
                       {"transpose_b", std::int64_t{!of_b}},
                       {"scale_rows_b", scale_rows},
                       {"square_scales", std::int64_t{squares}}}};
      };
    };
    const PoisonedTensor want(DType::f32, {kM, kN});
    product(false, false, true)(want).run();
    for (const auto& [of_a, of_b] : {std::pair{true, false}, {false, true}}) {
      const PoisonedTensor y(DType::f32, {kM, kN});
      product(of_a, of_b, true)(y).run();
      CHECK(compare(y.view(), doubles(want), 1e-4, 0) == "");
      CHECK(product(of_a, of_b, false)(y).refusal().find("K-major") != std::string::npos);
    }
  }
}

TEST_CASE("matmul: scales for blocks of 128 along k, of b for one row or for 128") {
  for (Extents size : {Extents{1, 1, 1}, Extents{3, 7, 129}, Extents{130, 257, 300}, Extents{5, 4, 128}}) {
    for (std::int64_t scale_rows : {1, 128}) {
      for (DType result : {DType::f32, DType::bf16}) {
        for (int bits = 0; bits < 4; ++bits) {
          const std::int64_t m = size[0], n = size[1], k = size[2];
          const bool with_bias = (bits & 1) != 0, adds = (bits & 2) != 0;
          const Extents b_scales = scale_rows == 1 ? row_block_scales(n, k) : square_scales(n, k);
          auto a = normal(DType::e4m3, {m, k}, 1), b = normal(DType::e5m2, {n, k}, 2);
          auto scale_a = normal(DType::f32, row_block_scales(m, k), 3), scale_b = normal(DType::f32, b_scales, 4);
          auto bias = normal(result, {n}, 5), y = normal(result, {m, n}, 6);
          const std::vector<double> da = doubles(a), db = doubles(b), dsa = doubles(scale_a), dsb = doubles(scale_b);
          const std::vector<double> dbias = doubles(bias);
          std::vector<double> want = adds ? doubles(y) : std::vector<double>(static_cast<std::size_t>(m * n), 0.0);
          double magnitude = 0;
          for (std::int64_t i = 0; i < m; ++i) {
            for (std::int64_t j = 0; j < n; ++j) {
              double sum = with_bias ? dbias[static_cast<std::size_t>(j)] : 0, absolute = 8;
              for (std::int64_t l = 0; l < k; ++l) {
                const std::int64_t at_b = scale_rows == 1 ? l / 128 * n + j : j / 128 * b_scales[1] + l / 128;
                const double term = da[static_cast<std::size_t>(i * k + l)] * db[static_cast<std::size_t>(j * k + l)] *
                                    dsa[static_cast<std::size_t>(l / 128 * m + i)] *
                                    dsb[static_cast<std::size_t>(at_b)];
                sum += term, absolute += std::abs(term);
              }
              want[static_cast<std::size_t>(i * n + j)] += sum;
              magnitude = std::max(magnitude, absolute);
            }
          }
          TestOp{"matmul",   {a.view(), b.view(), with_bias ? bias.view() : absent(), scale_a.view(), scale_b.view()},
                 {y.view()}, {{"transpose_b", std::int64_t{1}}, {"scale_rows_b", scale_rows}},
                 {},         adds}
              .run();
          CAPTURE(to_string(size));
          CAPTURE(scale_rows);
          CAPTURE(bits);
          // As in check(); scales that are no powers of two round each term besides.
          CHECK(compare(y.view(), want, magnitude * 0x1p-24 * (8 + static_cast<double>(k) / 8), 0) == "");
        }
      }
    }
  }
}

TEST_CASE("matmul refuses block scales that do not fit") {
  auto a = normal(DType::e4m3, {3, 256}, 1), b = normal(DType::e4m3, {5, 256}, 2);
  auto refusal = [&](Extents scale_a, Extents scale_b, std::int64_t scale_rows, std::int64_t transpose_a = 0) {
    PoisonedTensor y(DType::f32, {transpose_a ? 256 : 3, 5});
    PoisonedTensor left(DType::f32, scale_a), right(DType::f32, scale_b);
    auto turned = normal(DType::e4m3, {256, 256}, 1);
    return TestOp{"matmul",
                  {transpose_a ? turned.view() : a.view(), b.view(), absent(), left.view(), right.view()},
                  {y.view()},
                  {{"transpose_a", transpose_a}, {"transpose_b", std::int64_t{1}}, {"scale_rows_b", scale_rows}}}
        .refusal();
  };
  CHECK(refusal({2, 3}, {2, 5}, 1) == "");
  CHECK(refusal({2, 3}, {1, 4}, 128) == "");
  CHECK(refusal({7}, {11}, 1) == "");  // room for more
  CHECK(refusal({2, 3}, {1, 4}, 1) == "matmul needs block scales in f32 (2, 3) and (2, 5)");
  CHECK(refusal({1}, {1, 4}, 128) == "matmul needs block scales in f32 (2, 3) and (1, 4)");
  CHECK(refusal({2, 3}, {1, 4}, 64) == "matmul needs a scale_rows_b of 1 or 128");
  CHECK(refusal({2, 256}, {2, 5}, 1, 1).find("K-major") != std::string::npos);
}

TEST_CASE("matmul says why it refuses") {
  auto a = normal(DType::f32, {3, 4}, 1), b = normal(DType::f32, {5, 2}, 2);
  PoisonedTensor y(DType::f32, {3, 2}), q(DType::e4m3, {3, 2});
  CHECK(TestOp{"matmul", {a.view(), b.view()}, {y.view()}}.refusal() ==
        "matmul operand b: found (5, 2), expected (4, 2)");
  auto fits = normal(DType::f32, {4, 2}, 2), bias = normal(DType::f32, {3}, 3);
  CHECK(TestOp{"matmul", {a.view(), fits.view()}, {q.view()}}.refusal() ==
        "matmul operand y: found e4m3, expected f32 or bf16");
  CHECK(TestOp{"matmul", {a.view(), fits.view(), bias.view()}, {y.view()}}.refusal() ==
        "matmul operand bias: found (3), expected (2)");
  CHECK_THROWS_AS((TestOp{"matmul", {a.view(), b.view()}, {y.view()}}.run()), Error);
  PoisonedTensor wide(DType::i8, {1, 1 << 18}), result(DType::f32, {1, 1});
  CHECK(TestOp{"matmul", {wide.view(), wide.view()}, {result.view()}, {{"transpose_b", std::int64_t{1}}}}.refusal() ==
        "matmul of i8 may overflow with K above 131072 elements, found 262144");
}

TEST_CASE("matmuls with columns of a wide matrix have the sums of double precision, in place too") {
  for (DType dtype : {DType::f32, DType::bf16})
    for (std::int64_t first : {0, 3, 5}) {
      CAPTURE(first);
      constexpr std::size_t kRows = 7, kWidth = 9, kColumns = 4, kRank = 3;
      const auto from = static_cast<std::size_t>(first);
      const Extents wide{7, 9}, narrow{7, 3}, weight{4, 3};
      PoisonedTensor y = normal(dtype, wide, 1), a = normal(dtype, narrow, 2), b = normal(dtype, weight, 3);
      PoisonedTensor turned(dtype, {3, 4}), sum(dtype, wide), product(dtype, narrow),
          gradient = normal(dtype, weight, 4);
      Doubles want = doubles(y.view()), want_product(kRows * kRank), want_gradient = doubles(gradient.view());
      const Doubles xs = want, as = doubles(a.view()), bs = doubles(b.view());
      for (std::size_t row = 0; row < kRows; ++row)
        for (std::size_t i = 0; i < kColumns; ++i)
          for (std::size_t k = 0; k < kRank; ++k) {
            const double x = xs[row * kWidth + from + i];
            want[row * kWidth + from + i] += 1.5 * as[row * kRank + k] * bs[i * kRank + k];
            want_product[row * kRank + k] += 1.5 * x * bs[i * kRank + k];
            want_gradient[i * kRank + k] += 1.5 * x * as[row * kRank + k];
          }
      Attributes attributes{{"first", first}, {"factor", 1.5}, {"transpose_b", std::int64_t{1}}};
      OpRun("add_matmul", attributes).in(y.view()).in(a.view()).in(b.view()).out(sum.view()).run();
      CHECK(compare(sum.view(), want) == "");
      OpRun("columns_matmul", attributes).in(y.view()).in(b.view()).out(product.view()).run();
      CHECK(compare(product.view(), want_product) == "");
      OpRun("columns_weight_grad", attributes).in(y.view()).in(a.view()).in(b.view()).out(gradient.view(), true).run();
      CHECK(compare(gradient.view(), want_gradient) == "");
      OpRun("transpose").in(b.view()).out(turned.view()).run();
      attributes.set("transpose_b", std::int64_t{0});
      OpRun("add_matmul", attributes).in(y.view()).in(a.view()).in(turned.view()).out(y.view()).run();
      CHECK(compare(y.view(), want) == "");
    }
  PoisonedTensor y = normal(DType::f32, {3, 7}, 1), a = normal(DType::f32, {3, 2}, 2),
                 b = normal(DType::f32, {4, 2}, 3);
  Attributes attributes{{"first", std::int64_t{4}}, {"factor", 1.5}, {"transpose_b", std::int64_t{1}}};
  CHECK(OpRun("add_matmul", attributes).in(y.view()).in(a.view()).in(b.view()).out(y.view()).refusal() ==
        "add_matmul columns: found 4 to 8, expected them within 7");
}
