// RMS norm against its definition in double precision, gradients against finite differences of it.
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;

namespace {

constexpr double kEps = 1e-5;
const Attributes kAttributes{{"eps", kEps}};
constexpr DType kDtypes[] = {DType::f32, DType::bf16};
const Extents kSizes[] = {{1, 1}, {1, 7}, {3, 1}, {3, 17}, {7, 33}, {33, 7}, {77, 3}};

/// y, with rstd (rows) if wanted.
Doubles reference(const Doubles& x, const Doubles& weight, Doubles* rstd = nullptr) {
  std::size_t columns = weight.size();
  Doubles y(x.size());
  for (std::size_t row = 0; row < x.size() / columns; ++row) {
    double squares = 0;
    for (std::size_t i = 0; i < columns; ++i) squares += x[row * columns + i] * x[row * columns + i];
    double scale = 1 / std::sqrt(squares / static_cast<double>(columns) + kEps);
    if (rstd) rstd->push_back(scale);
    for (std::size_t i = 0; i < columns; ++i) y[row * columns + i] = x[row * columns + i] * scale * weight[i];
  }
  return y;
}

struct Case {
  Case(DType dtype, const Extents& size)
      : x(normal(dtype, size, 1)),
        other(normal(dtype, size, 2)),
        dy(normal(dtype, size, 3)),
        weight(normal(dtype, {size[1]}, 4, 1.0, 0.3)),
        rstd(DType::f32, {size[0]}),
        y(dtype, size),
        sum(dtype, size),
        dx(dtype, size),
        dweight(dtype, {size[1]}) {}
  void forward() { OpRun("rms_norm", kAttributes).in(x.view()).in(weight.view()).out(y.view()).out(rstd.view()).run(); }
  PoisonedTensor x, other, dy, weight, rstd, y, sum, dx, dweight;
};

/// The unfused gradient and add.
void gradient_then_add(Case& c) {
  OpRun("rms_norm_grad")
      .in(c.dy.view())
      .in(c.x.view())
      .in(c.weight.view())
      .in(c.rstd.view())
      .out(c.dx.view())
      .out(c.dweight.view())
      .run();
  OpRun("add").in(c.dx.view()).in(c.other.view()).out(c.sum.view()).run();
}

}  // namespace

TEST_CASE("rms_norm is its definition") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : kSizes) {
      CAPTURE(label(dtype, size));
      Case c(dtype, size);
      c.forward();
      Doubles rstd, y = reference(doubles(c.x.view()), doubles(c.weight.view()), &rstd);
      CHECK(compare(c.y.view(), y) == "");
      CHECK(compare(c.rstd.view(), rstd) == "");
    }
  }
}

TEST_CASE("rms_norm_grad is the slope of rms_norm") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : kSizes) {
      CAPTURE(label(dtype, size));
      Case c(dtype, size);
      c.forward();
      gradient_then_add(c);
      Doubles x = doubles(c.x.view()), weight = doubles(c.weight.view()), dy = doubles(c.dy.view());
      Doubles dx = numeric_gradient([&](const Doubles& at) { return dot(reference(at, weight), dy); }, x);
      Doubles dweight = numeric_gradient([&](const Doubles& at) { return dot(reference(x, at), dy); }, weight);
      // The slope at x of one channel is nearly a step: there rstd reaches 1 / |x|, and errors scale with it.
      double slack = size[1] == 1 ? 1e-4 : 1e-5;
      CHECK(compare(c.dx.view(), dx, slack) == "");
      CHECK(compare(c.dweight.view(), dweight) == "");

      PoisonedTensor total = normal(dtype, {size[1]}, 9);
      Doubles before = doubles(total.view());
      OpRun("rms_norm_grad")
          .in(c.dy.view())
          .in(c.x.view())
          .in(c.weight.view())
          .in(c.rstd.view())
          .out(c.dx.view())
          .out(total.view(), true)
          .run();
      CHECK(compare(total.view(), plus(dweight, before)) == "");
    }
  }
}

TEST_CASE("an unread weight gradient changes nothing else") {
  Case c(DType::f32, {77, 33});
  c.forward();
  gradient_then_add(c);
  PoisonedTensor dx(DType::f32, {77, 33});
  OpRun("rms_norm_grad")
      .in(c.dy.view())
      .in(c.x.view())
      .in(c.weight.view())
      .in(c.rstd.view())
      .out(dx.view())
      .unread(DType::f32, {33})
      .run();
  CHECK(difference(dx.view(), c.dx.view()) == "");
}

TEST_CASE("add_rms_norm gives the bits of add and rms_norm") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : {Extents{1, 1}, Extents{7, 17}, Extents{77, 33}, Extents{65, 256}}) {
      CAPTURE(label(dtype, size));
      Case c(dtype, size);
      OpRun("add").in(c.x.view()).in(c.other.view()).out(c.sum.view()).run();
      OpRun("rms_norm", kAttributes).in(c.sum.view()).in(c.weight.view()).out(c.y.view()).out(c.rstd.view()).run();
      PoisonedTensor sum(dtype, size), y(dtype, size), rstd(DType::f32, {size[0]}), y_alone(dtype, size);
      auto fused = [&] {
        return OpRun("add_rms_norm", kAttributes).in(c.x.view()).in(c.other.view()).in(c.weight.view());
      };
      fused().out(sum.view()).out(y.view()).out(rstd.view()).run();
      CHECK(difference(sum.view(), c.sum.view()) == "");
      CHECK(difference(y.view(), c.y.view()) == "");
      CHECK(difference(rstd.view(), c.rstd.view()) == "");
      fused().unread(dtype, size).out(y_alone.view()).unread(DType::f32, {size[0]}).run();
      CHECK(difference(y_alone.view(), c.y.view()) == "");
      // In place: the sum over a, y over b.
      PoisonedTensor a = copy_of(c.x.view()), b = copy_of(c.other.view());
      OpRun("add_rms_norm", kAttributes)
          .in(a.view())
          .in(b.view())
          .in(c.weight.view())
          .out(a.view())
          .out(b.view())
          .out(rstd.view())
          .run();
      CHECK(difference(a.view(), c.sum.view()) == "");
      CHECK(difference(b.view(), c.y.view()) == "");
    }
  }
}

TEST_CASE("rms_norm_grad_add gives the bits of rms_norm_grad and add") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : {Extents{1, 1}, Extents{7, 17}, Extents{77, 33}, Extents{65, 256}}) {
      CAPTURE(label(dtype, size));
      Case c(dtype, size);
      c.forward();
      gradient_then_add(c);
      PoisonedTensor dx(dtype, size), dweight(dtype, {size[1]}), sum(dtype, size);
      auto fused = [&](const View& dy, const View& e) {
        return OpRun("rms_norm_grad_add").in(dy).in(c.x.view()).in(c.weight.view()).in(c.rstd.view()).in(e);
      };
      fused(c.dy.view(), c.other.view()).out(dx.view()).out(dweight.view()).out(sum.view()).run();
      CHECK(difference(dx.view(), c.dx.view()) == "");
      CHECK(difference(dweight.view(), c.dweight.view()) == "");
      CHECK(difference(sum.view(), c.sum.view()) == "");
      // In place, the unread part left out: over dy, then over e.
      PoisonedTensor dy = copy_of(c.dy.view()), e = copy_of(c.other.view());
      fused(dy.view(), c.other.view()).unread(dtype, size).out(dweight.view()).out(dy.view()).run();
      CHECK(difference(dy.view(), c.sum.view()) == "");
      fused(c.dy.view(), e.view()).unread(dtype, size).out(dweight.view()).out(e.view()).run();
      CHECK(difference(e.view(), c.sum.view()) == "");
    }
  }
}

TEST_CASE("rms_norm does not depend on threads or addresses") {
  Case c(DType::f32, {131, 67});
  c.forward();
  gradient_then_add(c);
  for (int threads : {1, 2, 3, 5}) {
    CAPTURE(threads);
    Threads set(threads);
    Case again(DType::f32, {131, 67});
    again.forward();
    gradient_then_add(again);
    CHECK(difference(again.y.view(), c.y.view()) == "");
    CHECK(difference(again.dweight.view(), c.dweight.view()) == "");
    CHECK(difference(again.sum.view(), c.sum.view()) == "");
  }
  for (std::int64_t shift : {1, 2, 3, 5, 8, 13}) {  // floats off alignment: vector loops must not reorder their sums
    CAPTURE(shift);
    PoisonedTensor room(DType::f32, {131 * 67 + shift}), y(DType::f32, {131 * 67 + shift});
    View x{room.view().as<float>() + shift, DType::f32, {131, 67}},
        moved{y.view().as<float>() + shift, DType::f32, {131, 67}};
    std::memcpy(x.data, c.x.view().data, x.bytes());
    OpRun("rms_norm", kAttributes).in(x).in(c.weight.view()).out(moved).out(c.rstd.view()).run();
    CHECK(difference(moved, c.y.view()) == "");
  }
}

TEST_CASE("rms_norm refuses operands that do not fit") {
  Case c(DType::f32, {3, 7});
  PoisonedTensor narrow(DType::f32, {6}), integers(DType::i32, {3, 7});
  CHECK(OpRun("rms_norm", kAttributes).in(c.x.view()).in(narrow.view()).out(c.y.view()).out(c.rstd.view()).refusal() ==
        "rms_norm operand weight: found (6), expected (7)");
  CHECK(OpRun("rms_norm", kAttributes)
            .in(integers.view())
            .in(c.weight.view())
            .out(c.y.view())
            .out(c.rstd.view())
            .refusal() == "rms_norm operand x: found i32, expected a real dtype");
  CHECK(OpRun("rms_norm", kAttributes)
            .in(c.x.view())
            .in(c.weight.view())
            .out(c.y.view(), true)
            .out(c.rstd.view())
            .refusal() == "rms_norm operand y: cannot be added to");
  CHECK(OpRun("rms_norm", kAttributes).in(c.x.view()).out(c.y.view()).out(c.rstd.view()).refusal() ==
        "rms_norm takes 2 inputs, found 1");
}
