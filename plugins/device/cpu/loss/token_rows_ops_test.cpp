#include "tests/op_harness.h"

#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include "quern/testkit/op_comparison.h"

using namespace quern;
using namespace quern::cpu::harness;
using testkit::integer_list;
using testkit::PoisonedTensor;

namespace {

constexpr DType kF32 = DType::f32;

std::vector<double> doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

/// sum of a[i] b[i]
double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * b[i];
  return sum;
}

PoisonedTensor of(const std::vector<float>& values) {
  return PoisonedTensor(kF32, {static_cast<std::int64_t>(values.size())}, values);
}

}  // namespace

TEST_CASE("tokens come first in each row, and gradients are of a linear map") {
  for (const Geometry geometry : {Geometry{1, 2}, {3, 5}, {4, 9}}) {
    const std::int64_t prefix = geometry.sequence == 9 ? 4 : 1, columns = 7;
    const PoisonedTensor x = normal(kF32, {geometry.batch * (geometry.sequence - prefix), columns}, 1);
    const PoisonedTensor tokens = normal(kF32, {prefix, columns}, 2), y(kF32, {geometry.tokens(), columns});
    TestOp{"prepend", {x.view(), tokens.view()}, {y.view()}, {}, geometry}.run();
    const auto *from = x.view().as<float>(), *got = y.view().as<float>();
    std::int64_t next = 0;
    for (std::int64_t i = 0; i < geometry.tokens(); ++i)
      for (std::int64_t c = 0; c < columns; ++c) {
        const bool before = i % geometry.sequence < prefix;
        REQUIRE(got[i * columns + c] ==
                (before ? tokens.view().as<float>()[i % geometry.sequence * columns + c] : from[next++]));
      }
    // <dy, y(x, tokens)> = <dx, x> + <dtokens, tokens>
    const PoisonedTensor dy = normal(kF32, {geometry.tokens(), columns}, 3), dx(kF32, x.view().extents);
    const PoisonedTensor dtokens = normal(kF32, {prefix, columns}, 4);
    const double before = dot(dtokens.floats(), tokens.floats());
    TestOp{"prepend_grad", {dy.view()}, {dx.view(), dtokens.view()}, {{"tokens", prefix}}, geometry, 2}.run();
    CHECK(dot(dx.floats(), x.floats()) + dot(dtokens.floats(), tokens.floats()) - before ==
          doctest::Approx(dot(dy.floats(), y.floats())).epsilon(1e-6));
  }
}

TEST_CASE("means over tokens of each row, and their gradients") {
  const Geometry geometry{3, 6};
  const std::int64_t columns = 5;
  for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, 1}, {1, 0}, {2, 3}, {0, 0}}) {
    CAPTURE(first);
    const Attributes attributes{{"first", first}, {"count", count}};
    const std::int64_t tokens = count == 0 ? geometry.sequence - first : count;
    const PoisonedTensor x = normal(kF32, {geometry.tokens(), columns}, 1), mean(kF32, {geometry.batch, columns});
    TestOp{"row_mean", {x.view()}, {mean.view()}, attributes, geometry}.run();
    for (std::int64_t row = 0; row < geometry.batch; ++row)
      for (std::int64_t c = 0; c < columns; ++c) {
        double want = 0;
        for (std::int64_t i = first; i < first + tokens; ++i)
          want += x.view().as<float>()[(row * geometry.sequence + i) * columns + c];
        CHECK(mean.view().as<float>()[row * columns + c] ==
              doctest::Approx(want / static_cast<double>(tokens)).epsilon(1e-6));
      }
    const PoisonedTensor dmean = normal(kF32, {geometry.batch, columns}, 2), dx(kF32, x.view().extents);
    TestOp{"row_mean_grad", {dmean.view()}, {dx.view()}, attributes, geometry}.run();
    CHECK(dot(dx.floats(), x.floats()) == doctest::Approx(dot(dmean.floats(), mean.floats())).epsilon(1e-6));
  }
  const PoisonedTensor x = normal(kF32, {geometry.tokens(), columns}, 1), mean(kF32, {geometry.batch, columns});
  CHECK(
      TestOp{"row_mean", {x.view()}, {mean.view()}, {{"first", std::int64_t{4}}, {"count", std::int64_t{3}}}, geometry}
          .refusal()
          .find("rows of 6") != std::string::npos);
}

TEST_CASE("cross-entropy of classes with label smoothing, and its gradient by finite differences") {
  const std::int64_t rows = 4, classes = 5;
  const std::vector<std::int32_t> known{3, -1, 0, 4};
  const PoisonedTensor labels = integer_list(known), logits = normal(kF32, {rows, classes}, 1, 2);
  for (const double smoothing : {0.0, 0.1}) {
    const Attributes attributes{{"smoothing", smoothing}};
    auto loss_of = [&](const std::vector<double>& x, std::int64_t row) {
      double sum = 0, wanted = 0;
      for (std::int64_t k = 0; k < classes; ++k) sum += std::exp(x[static_cast<std::size_t>(row * classes + k)]);
      for (std::int64_t k = 0; k < classes; ++k)
        wanted += x[static_cast<std::size_t>(row * classes + k)] *
                  (smoothing / static_cast<double>(classes) +
                   (k == known[static_cast<std::size_t>(row)] ? 1 - smoothing : 0.0));
      return known[static_cast<std::size_t>(row)] < 0 ? 0.0 : std::log(sum) - wanted;
    };
    const PoisonedTensor loss(kF32, {rows}), correct(kF32, {rows}), dlogits(kF32, {rows, classes}),
        dloss = normal(kF32, {rows}, 2);
    TestOp{"class_loss", {logits.view(), labels.view()}, {loss.view(), correct.view()}, attributes}.run();
    TestOp{"class_loss_grad", {dloss.view(), logits.view(), labels.view()}, {dlogits.view()}, attributes}.run();
    const std::vector<double> x = doubles(logits.floats());
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto first = x.begin() + row * classes;
      const bool right = std::max_element(first, first + classes) - first == known[static_cast<std::size_t>(row)];
      CHECK(correct.view().as<float>()[row] == (right ? 1.0f : 0.0f));
      CHECK(loss.view().as<float>()[row] == doctest::Approx(loss_of(x, row)).epsilon(1e-6));
      for (std::int64_t k = 0; k < classes; ++k) {
        std::vector<double> moved[2] = {x, x};
        const auto at = static_cast<std::size_t>(row * classes + k);
        moved[0][at] -= 1e-4, moved[1][at] += 1e-4;
        const double slope = (loss_of(moved[1], row) - loss_of(moved[0], row)) / 2e-4;
        CHECK(dlogits.view().as<float>()[at] == doctest::Approx(dloss.view().as<float>()[row] * slope).epsilon(1e-5));
      }
    }
  }
}

TEST_CASE("losses are weighed") {
  const PoisonedTensor x = of({1, 2, 3}), factors = of({0, 0.5f, 2}), y = of({9, 9, 9});
  TestOp{"weigh", {x.view(), factors.view()}, {y.view()}}.run();
  CHECK(y.floats() == std::vector<float>{0, 1, 6});
}
