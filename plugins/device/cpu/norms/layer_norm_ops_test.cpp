// Layer norm against its definition in double precision, gradients against finite differences of it.
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;

namespace {

constexpr double kEps = 1e-5;
const Attributes kAttributes{{"eps", kEps}};
constexpr DType kDtypes[] = {DType::f32, DType::bf16};
const Extents kSizes[] = {{1, 3}, {1, 7}, {3, 17}, {7, 33}, {33, 7}, {77, 5}};
const Extents kFusedSizes[] = {{1, 3}, {7, 17}, {77, 33}, {65, 256}};

struct Statistics {
  Doubles mean, rstd;
};

Doubles reference(const Doubles& x, const Doubles& weight, const Doubles& bias, Statistics* statistics = nullptr) {
  std::size_t columns = weight.size();
  double width = static_cast<double>(columns);
  Doubles y(x.size());
  for (std::size_t row = 0; row < x.size() / columns; ++row) {
    const double* in = x.data() + row * columns;
    double mean = 0, variance = 0;
    for (std::size_t i = 0; i < columns; ++i) mean += in[i] / width;
    for (std::size_t i = 0; i < columns; ++i) variance += (in[i] - mean) * (in[i] - mean) / width;
    double rstd = 1 / std::sqrt(variance + kEps);
    if (statistics) statistics->mean.push_back(mean), statistics->rstd.push_back(rstd);
    for (std::size_t i = 0; i < columns; ++i) y[row * columns + i] = (in[i] - mean) * rstd * weight[i] + bias[i];
  }
  return y;
}

struct Case {
  Case(DType dtype, const Extents& size)
      : x(normal(dtype, size, 1, 0.5)),
        other(normal(dtype, size, 2)),
        dy(normal(dtype, size, 3)),
        weight(normal(dtype, {size[1]}, 4, 1.0, 0.3)),
        bias(normal(dtype, {size[1]}, 5)),
        mean(DType::f32, {size[0]}),
        rstd(DType::f32, {size[0]}),
        y(dtype, size),
        sum(dtype, size),
        dx(dtype, size),
        dweight(dtype, {size[1]}),
        dbias(dtype, {size[1]}) {}
  void forward(const View& from) {
    OpRun("layer_norm", kAttributes)
        .in(from)
        .in(weight.view())
        .in(bias.view())
        .out(y.view())
        .out(mean.view())
        .out(rstd.view())
        .run();
  }
  OpRun gradient(const char* kind, const View& upstream) const {
    return OpRun(kind).in(upstream).in(x.view()).in(weight.view()).in(mean.view()).in(rstd.view());
  }
  void gradient_then_add() {
    gradient("layer_norm_grad", dy.view()).out(dx.view()).out(dweight.view()).out(dbias.view()).run();
    OpRun("add").in(dx.view()).in(other.view()).out(sum.view()).run();
  }
  PoisonedTensor x, other, dy, weight, bias, mean, rstd, y, sum, dx, dweight, dbias;
};

}  // namespace

TEST_CASE("layer_norm is its definition") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : kSizes) {
      CAPTURE(label(dtype, size));
      Case c(dtype, size);
      c.forward(c.x.view());
      Statistics statistics;
      Doubles y = reference(doubles(c.x.view()), doubles(c.weight.view()), doubles(c.bias.view()), &statistics);
      CHECK(compare(c.y.view(), y) == "");
      CHECK(compare(c.mean.view(), statistics.mean) == "");
      CHECK(compare(c.rstd.view(), statistics.rstd) == "");
    }
  }
}

TEST_CASE("layer_norm keeps its precision far from zero") {
  // Mean 1000 times the deviation: E[x^2] - E[x]^2 in fp32 would put the variance off by 6e-2.
  PoisonedTensor x = normal(DType::f32, {3, 257}, 1, 1000.0), y(DType::f32, {3, 257}), mean(DType::f32, {3}),
                 rstd(DType::f32, {3});
  std::vector<float> ones(257, 1.0f), zeros(257, 0.0f);
  PoisonedTensor weight(DType::f32, {257}, ones), bias(DType::f32, {257}, zeros);
  OpRun("layer_norm", kAttributes)
      .in(x.view())
      .in(weight.view())
      .in(bias.view())
      .out(y.view())
      .out(mean.view())
      .out(rstd.view())
      .run();
  // The sum reaches 2.6e5, where fp32 is spaced 2^-5. One after the other, 257 additions err by 257 * 2^-6 at worst,
  // and as a random walk by 0.15, or 6e-4 in the mean, which shifts y; three of them.
  CHECK(compare(y.view(), reference(doubles(x.view()), Doubles(257, 1.0), Doubles(257, 0.0)), 2e-3) == "");
}

TEST_CASE("layer_norm_grad is the slope of layer_norm") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : kSizes) {
      CAPTURE(label(dtype, size));
      Case c(dtype, size);
      c.forward(c.x.view());
      c.gradient_then_add();
      Doubles x = doubles(c.x.view()), weight = doubles(c.weight.view()), bias = doubles(c.bias.view()),
              dy = doubles(c.dy.view());
      Doubles dx = numeric_gradient([&](const Doubles& at) { return dot(reference(at, weight, bias), dy); }, x);
      Doubles dweight = numeric_gradient([&](const Doubles& at) { return dot(reference(x, at, bias), dy); }, weight);
      Doubles dbias = numeric_gradient([&](const Doubles& at) { return dot(reference(x, weight, at), dy); }, bias);
      CHECK(compare(c.dx.view(), dx) == "");
      CHECK(compare(c.dweight.view(), dweight) == "");
      CHECK(compare(c.dbias.view(), dbias) == "");

      PoisonedTensor total = normal(dtype, {size[1]}, 9), bias_alone(dtype, {size[1]});
      Doubles before = doubles(total.view());
      c.gradient("layer_norm_grad", c.dy.view())
          .out(c.dx.view())
          .out(total.view(), true)
          .unread(dtype, {size[1]})
          .run();
      CHECK(compare(total.view(), plus(dweight, before)) == "");
      c.gradient("layer_norm_grad", c.dy.view())
          .unread(dtype, size)
          .unread(dtype, {size[1]})
          .out(bias_alone.view())
          .run();
      CHECK(difference(bias_alone.view(), c.dbias.view()) == "");
    }
  }
}

TEST_CASE("add_layer_norm gives the bits of add and layer_norm") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : kFusedSizes) {
      CAPTURE(label(dtype, size));
      Case c(dtype, size);
      OpRun("add").in(c.x.view()).in(c.other.view()).out(c.sum.view()).run();
      c.forward(c.sum.view());
      PoisonedTensor sum(dtype, size), y(dtype, size), mean(DType::f32, {size[0]}), rstd(DType::f32, {size[0]});
      auto fused = [&](const View& a) {
        return OpRun("add_layer_norm", kAttributes).in(a).in(c.other.view()).in(c.weight.view()).in(c.bias.view());
      };
      fused(c.x.view()).out(sum.view()).out(y.view()).out(mean.view()).out(rstd.view()).run();
      CHECK(difference(sum.view(), c.sum.view()) == "");
      CHECK(difference(y.view(), c.y.view()) == "");
      CHECK(difference(mean.view(), c.mean.view()) == "");
      CHECK(difference(rstd.view(), c.rstd.view()) == "");
      PoisonedTensor a = copy_of(c.x.view());  // y over a, the sum unread
      fused(a.view()).unread(dtype, size).out(a.view()).out(mean.view()).unread(DType::f32, {size[0]}).run();
      CHECK(difference(a.view(), c.y.view()) == "");
    }
  }
}

TEST_CASE("layer_norm_grad_add gives the bits of layer_norm_grad and add") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : kFusedSizes) {
      CAPTURE(label(dtype, size));
      Case c(dtype, size);
      c.forward(c.x.view());
      c.gradient_then_add();
      PoisonedTensor dx(dtype, size), dweight(dtype, {size[1]}), dbias(dtype, {size[1]}), sum(dtype, size);
      c.gradient("layer_norm_grad_add", c.dy.view())
          .in(c.other.view())
          .out(dx.view())
          .out(dweight.view())
          .out(dbias.view())
          .out(sum.view())
          .run();
      CHECK(difference(dx.view(), c.dx.view()) == "");
      CHECK(difference(dweight.view(), c.dweight.view()) == "");
      CHECK(difference(dbias.view(), c.dbias.view()) == "");
      CHECK(difference(sum.view(), c.sum.view()) == "");
      PoisonedTensor dy = copy_of(c.dy.view()), e = copy_of(c.other.view());
      c.gradient("layer_norm_grad_add", dy.view())
          .in(c.other.view())
          .unread(dtype, size)
          .out(dweight.view())
          .out(dbias.view())
          .out(dy.view())
          .run();
      CHECK(difference(dy.view(), c.sum.view()) == "");
      c.gradient("layer_norm_grad_add", c.dy.view())
          .in(e.view())
          .unread(dtype, size)
          .out(dweight.view())
          .out(dbias.view())
          .out(e.view())
          .run();
      CHECK(difference(e.view(), c.sum.view()) == "");
    }
  }
}

TEST_CASE("layer_norm does not depend on threads") {
  Case c(DType::f32, {131, 67});
  c.forward(c.x.view());
  c.gradient_then_add();
  for (int threads : {1, 2, 3, 5}) {
    CAPTURE(threads);
    Threads set(threads);
    Case again(DType::f32, {131, 67});
    again.forward(again.x.view());
    again.gradient_then_add();
    CHECK(difference(again.y.view(), c.y.view()) == "");
    CHECK(difference(again.dweight.view(), c.dweight.view()) == "");
    CHECK(difference(again.dbias.view(), c.dbias.view()) == "");
    CHECK(difference(again.sum.view(), c.sum.view()) == "");
  }
}

TEST_CASE("layer_norm refuses statistics that are not f32") {
  Case c(DType::bf16, {3, 7});
  PoisonedTensor short_mean(DType::bf16, {3});
  CHECK(OpRun("layer_norm", kAttributes)
            .in(c.x.view())
            .in(c.weight.view())
            .in(c.bias.view())
            .out(c.y.view())
            .out(short_mean.view())
            .out(c.rstd.view())
            .refusal() == "layer_norm operand mean: found bf16, expected f32");
}
