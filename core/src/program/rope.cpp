// Frequencies of rotary embeddings, in double precision. Each scaling is one small function on the unscaled inverse
// frequencies; names and formulas are from transformers' modeling_rope_utils.
#include "quern/rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "quern/error.h"

namespace quern {

namespace {

constexpr double kTurn = 2 * std::numbers::pi;  // radians
constexpr std::array<const char*, 4> kTypes{"default", "linear", "llama3", "yarn"};

std::string number(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

// Wavelengths that fit high_freq_factor times into the original context keep their frequency, those that do not fit
// low_freq_factor times are divided by the factor, between them the two are mixed.
void scale_llama3(std::vector<double>& inverse, const RopeConfig& config) {
  double context = static_cast<double>(config.original_max_position_embeddings);
  for (double& frequency : inverse) {
    double turns = context * frequency / kTurn;  // over the original context
    double keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor);
    keep = std::clamp(keep, 0.0, 1.0);
    frequency = (1 - keep) * frequency / config.factor + keep * frequency;
  }
}

// Peng et al., "YaRN" (2023): a linear ramp over the pair index, between the pairs that turn beta_fast and beta_slow
// times over the original context, divides the slow ones by the factor.
void scale_yarn(std::vector<double>& inverse, const RopeConfig& config, std::int64_t head_dim) {
  double width = static_cast<double>(head_dim);
  auto pair_that_turns = [&](double turns) {
    double context = static_cast<double>(config.original_max_position_embeddings);
    return width * std::log(context / (turns * kTurn)) / (2 * std::log(config.theta));
  };
  double low = std::max(std::floor(pair_that_turns(config.beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_that_turns(config.beta_slow)), width - 1);
  if (low == high) high += 0.001;  // as transformers does
  for (std::size_t i = 0; i < inverse.size(); ++i) {
    double divide = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inverse[i] = inverse[i] / config.factor * divide + inverse[i] * (1 - divide);
  }
}

}  // namespace

std::vector<std::string> rope_problems(const RopeConfig& config, std::int64_t head_dim) {
  std::vector<std::string> problems;
  auto expect = [&problems](bool good, const std::string& field, const std::string& found,
                            const std::string& expected) {
    if (!good) problems.push_back(field + ": found " + found + ", expected " + expected);
  };
  auto expect_positive = [&expect](const std::string& field, double value) {
    expect(std::isfinite(value) && value > 0, field, number(value), "a number above 0");
  };
  bool known = std::find(kTypes.begin(), kTypes.end(), config.type) != kTypes.end();
  expect(known, "rope_scaling.rope_type", config.type, "one of default, linear, llama3, yarn");
  expect(head_dim > 0 && head_dim % 2 == 0, "head_dim", std::to_string(head_dim), "an even number above 0");
  expect(std::isfinite(config.theta) && config.theta > 1, "rope_theta", number(config.theta), "a number above 1");
  if (!known || config.type == "default") return problems;

  const std::string table = "rope_scaling.", use = " (" + config.type + " needs it)";
  expect(std::isfinite(config.factor) && config.factor >= 1, table + "factor", number(config.factor),
         "a number of at least 1" + use);
  if (config.type == "linear") return problems;
  expect(config.original_max_position_embeddings > 0, table + "original_max_position_embeddings",
         std::to_string(config.original_max_position_embeddings), "the context length before scaling, above 0" + use);
  if (config.type == "llama3") {
    expect_positive(table + "low_freq_factor", config.low_freq_factor);
    expect(std::isfinite(config.high_freq_factor) && config.high_freq_factor > config.low_freq_factor,
           table + "high_freq_factor", number(config.high_freq_factor),
           "a number above low_freq_factor, which is " + number(config.low_freq_factor));
  } else {
    expect_positive(table + "beta_slow", config.beta_slow);
    expect(std::isfinite(config.beta_fast) && config.beta_fast >= config.beta_slow, table + "beta_fast",
           number(config.beta_fast), "a number of at least beta_slow, which is " + number(config.beta_slow));
    expect(std::isfinite(config.attention_factor) && config.attention_factor >= 0, table + "attention_factor",
           number(config.attention_factor), "a number above 0, or 0 for 0.1 ln(factor) + 1");
  }
  return problems;
}

RopeFrequencies rope_frequencies(const RopeConfig& config, std::int64_t head_dim) {
  if (auto problems = rope_problems(config, head_dim); !problems.empty()) {
    std::string all = problems[0];
    for (std::size_t i = 1; i < problems.size(); ++i) all += "; " + problems[i];
    throw Error(ErrorCode::config, {.where = "rope", .what = all, .found = {}, .expected = {}, .next = {}});
  }
  RopeFrequencies result;
  for (std::int64_t i = 0; i < head_dim; i += 2)
    result.inverse.push_back(std::pow(config.theta, -static_cast<double>(i) / static_cast<double>(head_dim)));
  if (config.type == "linear")
    for (double& frequency : result.inverse) frequency /= config.factor;
  if (config.type == "llama3") scale_llama3(result.inverse, config);
  if (config.type == "yarn") {
    scale_yarn(result.inverse, config, head_dim);
    result.magnitude = config.attention_factor > 0 ? config.attention_factor : 0.1 * std::log(config.factor) + 1;
  }
  return result;
}

}  // namespace quern
