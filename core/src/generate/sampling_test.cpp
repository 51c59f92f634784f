// Draws follow the probabilities they are to follow, and depend on nothing but their key.
#include "generate/sampling.h"

#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

constexpr int kDraws = 20000;

std::vector<double> frequencies(const std::vector<float>& logits, const Sampling& sampling) {
  std::vector<double> counts(logits.size());
  for (std::uint32_t draw = 0; draw < kDraws; ++draw)
    counts[static_cast<std::size_t>(sample_token(logits, sampling, draw % 7, draw / 7))] += 1.0 / kDraws;
  return counts;
}

// Within five standard deviations of a frequency.
void check_near(const std::vector<double>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    if (want[i] == 0) CHECK(got[i] == 0);
    CHECK(std::abs(got[i] - want[i]) <= 5 * std::sqrt(want[i] * (1 - want[i]) / kDraws) + 1e-9);  // and sums of counts
  }
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
  std::vector<double> p;
  double sum = 0;
  for (float logit : logits) sum += p.emplace_back(std::exp(double{logit} / temperature));
  for (double& value : p) value /= sum;
  return p;
}

const std::vector<float> kLogits{1.0f, 3.0f, -40.0f, 2.5f, 0.0f, 3.0f};

}  // namespace

TEST_CASE("temperature: draws follow the softmax of the divided logits") {
  for (double temperature : {0.5, 1.0, 3.0}) {
    CAPTURE(temperature);
    check_near(frequencies(kLogits, {.temperature = temperature, .top_p = 1, .seed = 3}),
               softmax(kLogits, temperature));
  }
}

TEST_CASE("temperature 0: the largest logit, the first of equal ones, whatever top_p and seed") {
  for (std::uint64_t seed : {1, 2})
    for (double top_p : {0.1, 1.0}) CHECK(sample_token(kLogits, {0, top_p, seed}, 0, 5) == 1);
}

TEST_CASE("top_p: the fewest likely tokens that reach it, in proportion") {
  std::vector<double> p = softmax(kLogits, 1);  // by likelihood: 1 and 5, 3, 0, 4, 2
  auto nucleus = [&](std::vector<std::size_t> kept) {
    std::vector<double> want(p.size());
    double sum = 0;
    for (std::size_t token : kept) sum += p[token];
    for (std::size_t token : kept) want[token] = p[token] / sum;
    return want;
  };
  check_near(frequencies(kLogits, {1, 1e-9, 3}), nucleus({1}));
  check_near(frequencies(kLogits, {1, p[1] * 1.01, 3}), nucleus({1, 5}));
  check_near(frequencies(kLogits, {1, p[1] * 2 + p[3] * 0.5, 3}), nucleus({1, 5, 3}));
  check_near(frequencies(kLogits, {1, 1 - p[4] * 0.5, 3}), nucleus({1, 5, 3, 0, 4}));
}

TEST_CASE("a draw depends on seed, sequence and position, and repeats") {
  std::vector<float> flat(1000);
  auto draw = [&](std::uint64_t seed, std::uint32_t sequence, std::uint32_t position) {
    return sample_token(flat, {1, 1, seed}, sequence, position);
  };
  std::int32_t first = draw(1, 0, 0);
  CHECK(first == draw(1, 0, 0));
  CHECK(first != draw(2, 0, 0));
  CHECK(first != draw(1, 1, 0));
  CHECK(first != draw(1, 0, 1));
}

TEST_CASE("extreme logits are no trouble, and logits that are not finite are an error") {
  CHECK(sample_token(std::vector<float>{-3e38f, 3e38f, 0.0f}, {1, 0.9, 1}, 0, 0) == 1);
  CHECK(sample_token(std::vector<float>{-3e38f}, {1e-6, 0.5, 1}, 0, 0) == 0);
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()})
    testkit::check_refused(ErrorCode::numerics, {"sequence 2, position 9: the logit of token 1"}, [&] {
      sample_token(std::vector<float>{0.0f, bad}, {0, 1, 1}, 2, 9);
    });
}
