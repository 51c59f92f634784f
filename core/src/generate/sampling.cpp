#include "generate/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "quern/error.h"
#include "quern/random.h"

namespace quern {

namespace {

void check_finite(std::span<const float> logits, std::uint32_t sequence, std::uint32_t position) {
  for (std::size_t token = 0; token < logits.size(); ++token)
    if (!std::isfinite(logits[token]))
      throw Error(ErrorCode::numerics,
                  {.where = "sequence " + std::to_string(sequence) + ", position " + std::to_string(position),
                   .what = "the logit of token " + std::to_string(token) + " is not finite",
                   .found = std::to_string(logits[token]),
                   .expected = "a finite number",
                   .next = "take weights from an earlier checkpoint, or another precision"});
}

// Uniform in (0, 1], in steps of 2^-53.
double uniform(std::uint64_t seed, std::uint32_t sequence, std::uint32_t position) {
  auto words = random_block({seed, RandomPurpose::sample, sequence}, position, 0);
  std::uint64_t bits = (std::uint64_t{words[0]} << 21) ^ (words[1] >> 11);
  return (static_cast<double>(bits & ((std::uint64_t{1} << 53) - 1)) + 1.0) * 0x1p-53;
}

}  // namespace

std::int32_t sample_token(std::span<const float> logits, const Sampling& sampling, std::uint32_t sequence,
                          std::uint32_t position) {
  if (logits.empty()) fail_internal("sampling", "no logits");
  check_finite(logits, sequence, position);
  auto best = std::max_element(logits.begin(), logits.end());
  if (sampling.temperature == 0) return static_cast<std::int32_t>(best - logits.begin());

  std::vector<double> weights(logits.size());  // exp of each logit, of which the largest is 1
  std::transform(logits.begin(), logits.end(), weights.begin(),
                 [&](float logit) { return std::exp((double{logit} - double{*best}) / sampling.temperature); });
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::int32_t> kept(logits.size());
  std::iota(kept.begin(), kept.end(), 0);
  auto weight_of = [&](std::int32_t token) { return weights[static_cast<std::size_t>(token)]; };
  if (sampling.top_p < 1) {
    std::stable_sort(kept.begin(), kept.end(),
                     [&](std::int32_t a, std::int32_t b) { return weight_of(a) > weight_of(b); });
    double sum = 0, enough = sampling.top_p * total;
    std::size_t count = 0;
    while (count < kept.size() && sum < enough) sum += weight_of(kept[count++]);
    kept.resize(std::max<std::size_t>(count, 1));
    total = sum;
  }
  double left = uniform(sampling.seed, sequence, position) * total;
  for (std::int32_t token : kept)
    if ((left -= weight_of(token)) <= 0 && weight_of(token) > 0) return token;
  return *std::max_element(kept.begin(), kept.end(),  // rounding left a little: the likeliest
                           [&](std::int32_t a, std::int32_t b) { return weight_of(a) < weight_of(b); });
}

}  // namespace quern
