// Sums of many small terms, beside a large one or all alike: one running fp32 sum drops terms below half its last
// place, always in the same direction. Expected values are closed forms in double precision.
#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

namespace {

constexpr double kHalfStep = 0x1p-24;  // of fp32, relative: what rounding one result may change

PoisonedTensor filled(Extents extents, float value) {
  return {DType::f32, extents, std::vector<float>(static_cast<std::size_t>(element_count(extents)), value)};
}

double relative(double got, double want) { return std::fabs(got - want) / std::fabs(want); }

}  // namespace

TEST_CASE("a loss keeps the small probabilities of a large vocabulary") {
  constexpr std::int64_t kVocabulary = 49152;
  std::vector<float> logits(kVocabulary, 0.0f);
  logits[0] = 17;
  const PoisonedTensor x = filled({1, 1}, 1), weight(DType::f32, {kVocabulary, 1}, logits),
                       targets = integer_tensor({0});
  PoisonedTensor loss(DType::f32, {1}), trained(DType::f32, {1}), dx(DType::f32, {1, 1}),
      dweight(DType::f32, {kVocabulary, 1});
  TestOp{"lm_loss", {x.view(), weight.view(), targets.view()}, {loss.view()}}.run();
  TestOp{"lm_loss_train", {x.view(), weight.view(), targets.view()}, {trained.view(), dx.view(), dweight.view()}}.run();
  const double others = (kVocabulary - 1) * std::exp(-17.0), want = std::log1p(others);
  CHECK(relative(loss.floats()[0], want) < 1e-6);  // fast_exp errs by 2 ulp
  CHECK(relative(trained.floats()[0], want) < 1e-6);
  CHECK(relative(dweight.floats()[1], std::exp(-17.0) / (1 + others)) < 1e-6);
}

TEST_CASE("a loss over a large vocabulary has no bias") {
  constexpr std::int64_t kVocabulary = 49152, kTokens = 32;
  const PoisonedTensor x = normal(DType::f32, {kTokens, 1}, 1, 0, 3.0),
                       weight = normal(DType::f32, {kVocabulary, 1}, 2);
  const PoisonedTensor targets = integer_tensor(std::vector<std::int32_t>(kTokens, 7));
  PoisonedTensor loss(DType::f32, {kTokens});
  TestOp{"lm_loss", {x.view(), weight.view(), targets.view()}, {loss.view()}}.run();
  double bias = 0;
  for (std::int64_t token = 0; token < kTokens; ++token) {
    auto logit = [&](std::int64_t v) {
      return double{x.view().as<float>()[token] * weight.view().as<float>()[v]};  // as the matmul rounds it
    };
    double sum = 0;
    for (std::int64_t v = 0; v < kVocabulary; ++v) sum += std::exp(logit(v));
    bias += (loss.floats()[static_cast<std::size_t>(token)] - (std::log(sum) - logit(7))) / kTokens;
  }
  CHECK(std::fabs(bias) < 2e-7);  // half a step of a loss near 11 is 5e-7, of either sign
}

TEST_CASE("norms of long rows err by their results' rounding alone") {
  constexpr std::int64_t kColumns = 100003;
  const PoisonedTensor x = filled({1, kColumns}, 0.1f), ones = filled({kColumns}, 1), zeros = filled({kColumns}, 0);
  PoisonedTensor y(DType::f32, {1, kColumns}), mean(DType::f32, {1}), rstd(DType::f32, {1});
  TestOp{"rms_norm", {x.view(), ones.view()}, {y.view(), rstd.view()}, {{"eps", 0.0}}}.run();
  CHECK(relative(rstd.floats()[0], 1 / double{0.1f}) < 2 * kHalfStep);
  TestOp{"layer_norm", {x.view(), ones.view(), zeros.view()}, {y.view(), mean.view(), rstd.view()}, {{"eps", 1.0}}}
      .run();
  CHECK(relative(mean.floats()[0], double{0.1f}) < 2 * kHalfStep);

  // dx = rstd (dy - n mean(dy n)), in layer norm without dy's mean too: n = x here, with mean 0 and rstd 1 given.
  const PoisonedTensor one = filled({1}, 1), zero = filled({1}, 0), gradient = filled({1, kColumns}, 0.7f);
  PoisonedTensor dx(DType::f32, {1, kColumns}), dweight(DType::f32, {kColumns}), dbias(DType::f32, {kColumns});
  const PoisonedTensor wide = filled({1, kColumns}, 1.3f);
  TestOp{"rms_norm_grad", {gradient.view(), wide.view(), ones.view(), one.view()}, {dx.view(), dweight.view()}}.run();
  const double dy = double{0.7f}, n = double{1.3f};
  CHECK(std::fabs(dx.floats()[0] - (dy - n * (dy * n))) < 4 * kHalfStep);  // of terms near 1
  TestOp{"layer_norm_grad",
         {gradient.view(), wide.view(), ones.view(), zero.view(), one.view()},
         {dx.view(), dweight.view(), dbias.view()}}
      .run();
  CHECK(std::fabs(dx.floats()[0] + n * (dy * n)) < 4 * kHalfStep);
}

TEST_CASE("sums over many tokens err by little more than their rounding") {
  constexpr std::int64_t kTokens = 131072;
  const PoisonedTensor x = filled({kTokens, 3}, 0.1f);
  PoisonedTensor sum(DType::f32, {3}), table(DType::f32, {2, 3});
  const double want = kTokens * double{0.1f};
  TestOp{"column_sum", {x.view()}, {sum.view()}}.run();
  CHECK(relative(sum.floats()[0], want) < 16 * kHalfStep);  // blocks of 32 rows are summed in fp32
  const PoisonedTensor tokens = integer_tensor(std::vector<std::int32_t>(kTokens, 1));
  TestOp{"embedding_grad", {x.view(), tokens.view()}, {table.view()}, {{"rows", std::int64_t{2}}}}.run();
  CHECK(relative(table.floats()[3], want) < 16 * kHalfStep);
}
