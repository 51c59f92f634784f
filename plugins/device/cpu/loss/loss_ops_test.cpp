#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include "quern/error.h"
#include "quern/numeric.h"
#include "quern/step_state.h"
#include "quern/testkit/refusal.h"
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

namespace {

struct Sizes {
  std::int64_t tokens, width, vocabulary, chunk;
};

struct Reference {
  std::vector<double> loss, dx, dweight;
  double objective = 0;  ///< sum of losses + z_loss * logsumexp^2 over valid tokens
};

double rounded(DType dtype, double value) {
  return dtype == DType::bf16 ? round_to(dtype, static_cast<float>(value)) : value;
}

/// Logits and their gradients round to `dtype` where the op's do; f32 stands for no rounding.
Reference reference(const Sizes& s, const std::vector<double>& x, const std::vector<double>& w,
                    const std::vector<std::int32_t>& targets, double z_loss, double seed, DType dtype, double cap = 0) {
  Reference r{std::vector<double>(targets.size()), std::vector<double>(x.size()), std::vector<double>(w.size())};
  auto C = static_cast<std::size_t>(s.width), V = static_cast<std::size_t>(s.vocabulary);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] < 0) continue;
    std::vector<double> logits(V);
    double sum = 0;
    for (std::size_t v = 0; v < V; ++v) {
      for (std::size_t c = 0; c < C; ++c) logits[v] += x[i * C + c] * w[v * C + c];
      logits[v] = rounded(dtype, logits[v]);
      if (cap > 0) logits[v] = rounded(dtype, cap * std::tanh(logits[v] / cap));
      sum += std::exp(logits[v]);
    }
    double logsumexp = std::log(sum);
    r.loss[i] = logsumexp - logits[static_cast<std::size_t>(targets[i])];
    r.objective += r.loss[i] + z_loss * logsumexp * logsumexp;
    for (std::size_t v = 0; v < V; ++v) {
      double softmax = std::exp(logits[v]) / sum, onehot = static_cast<std::int32_t>(v) == targets[i] ? 1 : 0;
      const double slope = cap > 0 ? 1 - logits[v] * logits[v] / (cap * cap) : 1;
      double gradient = rounded(dtype, slope * seed * (softmax - onehot + 2 * z_loss * logsumexp * softmax));
      for (std::size_t c = 0; c < C; ++c) {
        r.dx[i * C + c] += gradient * w[v * C + c];
        r.dweight[v * C + c] += gradient * x[i * C + c];
      }
    }
  }
  return r;
}

std::vector<std::int32_t> some_targets(const Sizes& s) {
  std::vector<std::int32_t> targets;
  for (std::int64_t i = 0; i < s.tokens; ++i)
    targets.push_back(i % 5 == 3 ? -1 : static_cast<std::int32_t>((i * 7 + 2) % s.vocabulary));
  return targets;
}

const Sizes kSizes[] = {{1, 1, 1, 1}, {1, 3, 2, 9}, {7, 5, 17, 3}, {33, 17, 65, 8}, {65, 9, 130, 64}, {20, 7, 3, 20}};

}  // namespace

TEST_CASE("the reference gradient agrees with finite differences") {
  const double cap = 0.9;
  Sizes s{4, 3, 5, 4};
  auto targets = some_targets(s);
  auto x = doubles(normal(DType::f32, {4, 3}, 1)), w = doubles(normal(DType::f32, {5, 3}, 2));
  Reference r = reference(s, x, w, targets, 0.1, 1, DType::f32, cap);
  const double step = 1e-5;
  auto check = [&](std::vector<double>& values, const std::vector<double>& gradient) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      double kept = values[i];
      values[i] = kept + step;
      double up = reference(s, x, w, targets, 0.1, 1, DType::f32, cap).objective;
      values[i] = kept - step;
      double down = reference(s, x, w, targets, 0.1, 1, DType::f32, cap).objective;
      values[i] = kept;
      // Central differences err by step^2 times a third derivative, and by 1e-16 / step.
      CHECK(std::fabs((up - down) / (2 * step) - gradient[i]) < 1e-8);
    }
  };
  check(x, r.dx);
  check(w, r.dweight);
}

TEST_CASE("lm_loss and lm_loss_train at odd sizes, chunk by chunk") {
  for (const Sizes& s : kSizes) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      for (bool add : {false, true}) {
        for (auto [z_loss, cap] : {std::pair(0.0, 0.0), std::pair(0.01, 0.0), std::pair(0.01, 1.5)}) {
          if (cap > 0 && dtype == DType::bf16) continue;  // a bend rounds twice, not always to the reference's side
          CAPTURE(to_string(Extents{s.tokens, s.width, s.vocabulary, s.chunk}));
          CAPTURE(name_of(dtype));
          CAPTURE(add);
          CAPTURE(z_loss);
          CAPTURE(cap);
          const double seed = 4;
          auto targets = some_targets(s);
          auto target_tensor = integer_tensor(targets);
          auto x = normal(dtype, {s.tokens, s.width}, 1), w = normal(dtype, {s.vocabulary, s.width}, 2, 0, 0.5);
          auto previous = normal(dtype, {s.vocabulary, s.width}, 3);
          PoisonedTensor loss(DType::f32, {s.tokens}), alone(DType::f32, {s.tokens}), dx(dtype, {s.tokens, s.width});
          PoisonedTensor written(dtype, {s.vocabulary, s.width}),
              added(dtype, {s.vocabulary, s.width}, previous.floats());
          const PoisonedTensor& dw = add ? added : written;
          TestOp{
              "lm_loss", {x.view(), w.view(), target_tensor.view()}, {alone.view()}, {{"chunk", s.chunk}, {"cap", cap}}}
              .run();
          OpInstance op = TestOp{"lm_loss_train",
                                 {x.view(), w.view(), target_tensor.view()},
                                 {loss.view(), dx.view(), dw.view()},
                                 {{"chunk", s.chunk}, {"z_loss", z_loss}, {"seed", seed}, {"cap", cap}}}
                              .instance();
          op.outputs[2].accumulate = add;
          CpuDevice device({});
          PoisonedTensor workspace(DType::u8, {static_cast<std::int64_t>(device.query(op).workspace_bytes)});
          std::vector<View> inputs = {x.view(), w.view(), target_tensor.view()},
                            outputs = {loss.view(), dx.view(), dw.view()};
          const Stream stream = device.stream(StreamKind::compute);
          device.prepare(op)->launch(inputs, outputs, {stream, workspace.view().data});
          device.synchronize(stream);
          Reference want = reference(s, doubles(x), doubles(w), targets, z_loss, seed, dtype, cap);
          if (add) {
            auto before = doubles(previous);
            for (std::size_t i = 0; i < before.size(); ++i) want.dweight[i] += before[i];
          }
          // Slack: sums in fp32 of up to 130 terms of a few units, times the seed.
          CHECK(compare(loss.view(), want.loss, 1e-5, 0) == "");
          CHECK(compare(alone.view(), want.loss, 1e-5, 0) == "");
          CHECK(compare(dx.view(), want.dx, 2e-5, 0) == "");
          CHECK(compare(dw.view(), want.dweight, 5e-5, 0) == "");
        }
      }
    }
  }
}

TEST_CASE("the default chunk, unread gradients, and a gradient over its input") {
  Sizes s{150, 8, 40000, 0};  // several default chunks
  auto targets = some_targets(s);
  auto target_tensor = integer_tensor(targets);
  auto x = normal(DType::f32, {s.tokens, s.width}, 1), w = normal(DType::f32, {s.vocabulary, s.width}, 2, 0, 0.5);
  PoisonedTensor loss(DType::f32, {s.tokens}), dx(DType::f32, {s.tokens, s.width}),
      dw(DType::f32, {s.vocabulary, s.width});
  std::vector<View> inputs = {x.view(), w.view(), target_tensor.view()};
  TestOp{"lm_loss_train", inputs, {loss.view(), dx.view(), dw.view()}}.run();
  Reference want = reference(s, doubles(x), doubles(w), targets, 0, 1, DType::f32);
  // Slack: sums over 40000 logits.
  CHECK(compare(loss.view(), want.loss, 1e-4, 0) == "");
  CHECK(compare(dw.view(), want.dweight, 2e-5, 0) == "");
  CHECK(compare(dx.view(), want.dx, 2e-5, 0) == "");
  PoisonedTensor other_loss(DType::f32, {s.tokens});
  TestOp{"lm_loss_train",
         inputs,
         {other_loss.view(), absent(DType::f32, {s.tokens, s.width}), absent(DType::f32, {s.vocabulary, s.width})}}
      .run();
  CHECK(testkit::mismatch(other_loss.floats(), loss.floats(), 0) == "");
  TestOp{
      "lm_loss_train", inputs, {absent(DType::f32, {s.tokens}), x.view(), absent(DType::f32, {s.vocabulary, s.width})}}
      .run();
  CHECK(testkit::mismatch(x.floats(), dx.floats(), 0) == "");
}

TEST_CASE("large logits neither overflow nor lose the loss") {
  PoisonedTensor x(DType::f32, {2, 1}, std::vector<float>{1000.0f, -1000.0f}),
      w(DType::f32, {3, 1}, std::vector<float>{1, 0, -1});
  PoisonedTensor loss(DType::f32, {2});
  TestOp{"lm_loss", {x.view(), w.view(), integer_tensor({2, 2}).view()}, {loss.view()}}.run();
  CHECK(loss.floats() == std::vector<float>{2000.0f, 0.0f});
}

TEST_CASE("targets out of range are an input error, what does not fit is refused") {
  auto x = normal(DType::f32, {2, 3}, 1), w = normal(DType::f32, {5, 3}, 2), narrow = normal(DType::f32, {5, 2}, 2);
  PoisonedTensor loss(DType::f32, {2});
  for (std::int32_t bad : {5, -2}) {
    const Error error = testkit::error_of([&] {
      TestOp{"lm_loss", {x.view(), w.view(), integer_tensor({-1, bad}).view()}, {loss.view()}}.run();
    });
    CHECK(error.code() == ErrorCode::input);
    CHECK(error.detail().where == "targets[1]");
  }
  TestOp op{"lm_loss", {x.view(), narrow.view(), integer_tensor({1, 2}).view()}, {loss.view()}};
  CHECK(op.refusal() == "lm_loss operand weight: found (5, 2), expected (5, 3)");
  op.inputs[1] = w.view();
  op.attributes = {{"chunk", std::int64_t{0}}};
  CHECK(op.refusal() == "lm_loss needs a chunk of at least 1");
}

TEST_CASE("of quantized logits the gradients are observed: what a format's reach makes zero") {
  // The target's logit is 16 and the others are 0: probabilities of 2^-23, below e4m3's reach and within e5m2's.
  const Extents wide{3, 2}, weights{4, 2};
  const std::vector<float> x{16, 0, 16, 0, 16, 0}, weight{1, 0, 0, 1, 0, 1, 0, 1};
  testkit::PoisonedTensor one(DType::f32, {1}, std::vector<float>{1.0f});
  testkit::PoisonedTensor x_wide(DType::bf16, wide, x), x_codes(DType::e4m3, wide, x), x_t(DType::e4m3, {2, 3});
  testkit::PoisonedTensor w_wide(DType::bf16, weights, weight), w_codes(DType::e4m3, weights, weight),
      w_t(DType::e4m3, {2, 4}), seen(DType::u32, {kScaleObservationWords});
  const testkit::PoisonedTensor targets = integer_tensor({0, -1, 0});
  auto run = [&](const char* format, bool add) {
    testkit::PoisonedTensor dx(DType::bf16, wide), dw(DType::f32, weights, std::vector<float>(8, 0.0f));
    TestOp op{"lm_loss_train",
              {x_wide.view(), w_wide.view(), targets.view(), x_codes.view(), one.view(), x_t.view(), w_codes.view(),
               one.view(), w_t.view()},
              {absent(DType::f32, {3}), absent(DType::bf16, wide), dw.view(), seen.view()},
              {{"gradient_format", std::string(format)}}};
    op.accumulate = add ? 0b1100 : 0;
    op.run();
    return *seen.view().as<ScaleObservation>();
  };
  const ScaleObservation e4m3 = run("e4m3", false);
  CHECK(e4m3.elements == 8);  // of the tokens that count
  CHECK(e4m3.underflowed == 8);
  CHECK(e4m3.largest_scale == logit_gradient_scale(1, 0, DType::e4m3));
  const ScaleObservation e5m2 = run("e5m2", false);
  CHECK(e5m2.underflowed == 0);
  CHECK(e5m2.amax > 0);
  CHECK(e5m2.amax < 0x1p-20f);
  CHECK(e5m2.clipped == 0);
  CHECK(run("e5m2", true).elements == 16);
}

TEST_CASE("loss_stats sums valid tokens, overwriting or adding") {
  PoisonedTensor loss(DType::f32, {4}, std::vector<float>{1.5f, NAN, 2.25f, 0.0f}), stats(DType::f64, {4});
  auto targets = integer_tensor({3, -1, 0, 7});
  TestOp{"loss_stats", {loss.view(), targets.view()}, {stats.view()}}.run();
  CHECK(stats.floats() == std::vector<float>{3.75f, 3, 0, 0});
  TestOp{"loss_stats", {loss.view(), targets.view()}, {stats.view()}, {}, {}, 1}.run();
  CHECK(stats.floats() == std::vector<float>{7.5f, 6, 0, 0});
}
