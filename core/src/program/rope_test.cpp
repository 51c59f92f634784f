// Frequencies against transformers 5.0's own functions, run in double precision, and against the definitions.
#include "quern/rope.h"

#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

// Both sides are double precision; they differ by the order of a few roundings.
constexpr double kTolerance = 1e-13;

void check_frequencies(const RopeFrequencies& got, const std::vector<double>& want, double magnitude) {
  REQUIRE(got.inverse.size() == want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    CHECK(got.inverse[i] == doctest::Approx(want[i]).epsilon(kTolerance));
  }
  CHECK(got.magnitude == doctest::Approx(magnitude).epsilon(kTolerance));
}

std::string refusal(const RopeConfig& config, std::int64_t head_dim = 16) {
  return testkit::refusal(ErrorCode::config, [&] { rope_frequencies(config, head_dim); });
}

}  // namespace

TEST_CASE("default frequencies are theta to the power of minus 2i over the head size") {
  for (std::int64_t head_dim : {2, 6, 64, 128, 256}) {
    RopeFrequencies got = rope_frequencies({.theta = 500000.0}, head_dim);
    REQUIRE(static_cast<std::int64_t>(got.inverse.size()) == head_dim / 2);
    for (std::size_t i = 0; i < got.inverse.size(); ++i)
      CHECK(std::log(got.inverse[i]) ==
            doctest::Approx(-2.0 * static_cast<double>(i) / static_cast<double>(head_dim) * std::log(500000.0)));
    CHECK(got.inverse[0] == 1.0);
    CHECK(got.magnitude == 1.0);
  }
}

TEST_CASE("linear divides every frequency") {
  check_frequencies(rope_frequencies({.type = "linear", .factor = 2.0}, 8), {0.5, 0.05, 0.005, 0.0005}, 1.0);
}

TEST_CASE("llama3 keeps, mixes and divides bands as transformers does") {
  RopeConfig small{.type = "llama3", .theta = 100.0, .factor = 8.0, .original_max_position_embeddings = 96};
  check_frequencies(rope_frequencies(small, 16),
                    {1.0, 0.5623413251903491, 0.31622776601683794, 0.11128380372524835, 0.027896717399064033,
                     0.007029266564879363, 0.003952847075210474, 0.0022228492625486537},
                    1.0);
  RopeConfig llama31{.type = "llama3", .theta = 500000.0, .factor = 8.0, .original_max_position_embeddings = 8192};
  check_frequencies(rope_frequencies(llama31, 32),
                    {1.0, 0.44036660267178046, 0.19392274474868576, 0.08539710028576561, 0.03760603093086393,
                     0.016560440080994446, 0.00729266473721711, 0.0032114459947525913, 0.0005248461609929549,
                     7.784655273932451e-05, 3.428102195952591e-05, 1.509621717643313e-05, 6.647869871181236e-06,
                     2.9274998701761677e-06, 1.2891731721515574e-06, 5.677088100759837e-07},
                    1.0);
}

TEST_CASE("yarn ramps between the pairs that turn beta_fast and beta_slow times") {
  RopeConfig small{.type = "yarn", .factor = 4.0, .original_max_position_embeddings = 256, .beta_fast = 8.0};
  check_frequencies(rope_frequencies(small, 16),
                    {1.0, 0.31622776601683794, 0.075, 0.015811388300841896, 0.0025, 0.000790569415042095, 0.00025,
                     7.905694150420948e-05},
                    1.138629436111989);
  RopeConfig qwen{.type = "yarn", .theta = 1e6, .factor = 4.0, .original_max_position_embeddings = 32768};
  check_frequencies(rope_frequencies(qwen, 32),
                    {1.0, 0.4216965034285823, 0.1778279410038923, 0.07498942093324558, 0.03162277660168379,
                     0.01333521432163324, 0.0047799012641179675, 0.0016599615939631588, 0.00055, 0.00016867860137143292,
                     4.4456985250973074e-05, 1.8747355233311396e-05, 7.905694150420947e-06, 3.33380358040831e-06,
                     1.4058533129758728e-06, 5.928434264154139e-07},
                    1.138629436111989);
}

TEST_CASE("yarn with an empty ramp, and a given attention factor") {
  RopeConfig config{.type = "yarn", .factor = 4.0, .original_max_position_embeddings = 4, .attention_factor = 1.5};
  check_frequencies(rope_frequencies(config, 8), {1.0, 0.025, 0.0025, 0.00025}, 1.5);
}

TEST_CASE("a factor of one changes no frequency") {
  RopeFrequencies plain = rope_frequencies({}, 64);
  for (const char* type : {"linear", "llama3", "yarn"})
    check_frequencies(rope_frequencies({.type = type, .original_max_position_embeddings = 128}, 64), plain.inverse,
                      1.0);
}

TEST_CASE("scaled frequencies are between the plain ones and the plain ones divided by the factor, in order") {
  RopeFrequencies plain = rope_frequencies({}, 128);
  for (const char* type : {"llama3", "yarn"}) {
    RopeFrequencies scaled =
        rope_frequencies({.type = type, .factor = 8.0, .original_max_position_embeddings = 4096}, 128);
    for (std::size_t i = 0; i < plain.inverse.size(); ++i) {
      CHECK(scaled.inverse[i] <= plain.inverse[i] * (1 + kTolerance));
      CHECK(scaled.inverse[i] >= plain.inverse[i] / 8.0 * (1 - kTolerance));
      if (i > 0) CHECK(scaled.inverse[i] < scaled.inverse[i - 1]);
    }
    CHECK(scaled.inverse.front() == 1.0);
    CHECK(scaled.inverse.back() == doctest::Approx(plain.inverse.back() / 8.0).epsilon(kTolerance));
  }
}

TEST_CASE("what cannot be honoured is refused by name, all fields together") {
  for (const char* type : {"dynamic", "longrope", "mrope", ""}) {
    std::string text = refusal({.type = type});
    CHECK(text.find(std::string("found ") + type) != std::string::npos);
    CHECK(text.find("one of default, linear, llama3, yarn") != std::string::npos);
  }
  CHECK(refusal({}, 7).find("head_dim: found 7") != std::string::npos);
  CHECK(refusal({}, 0).find("head_dim: found 0") != std::string::npos);
  CHECK(refusal({.theta = 1.0}).find("rope_theta") != std::string::npos);
  CHECK(refusal({.theta = std::numeric_limits<double>::quiet_NaN()}).find("rope_theta") != std::string::npos);
  CHECK(refusal({.type = "linear", .factor = 0.5}).find("rope_scaling.factor: found 0.5") != std::string::npos);
  std::string llama3 = refusal({.type = "llama3", .factor = 0, .low_freq_factor = 4, .high_freq_factor = 4});
  for (const char* field :
       {"rope_scaling.factor", "rope_scaling.original_max_position_embeddings", "rope_scaling.high_freq_factor"})
    CHECK(llama3.find(field) != std::string::npos);
  std::string yarn = refusal({.type = "yarn", .factor = 2, .beta_fast = 0.5, .attention_factor = -1});
  for (const char* field :
       {"rope_scaling.original_max_position_embeddings", "rope_scaling.beta_fast", "rope_scaling.attention_factor"})
    CHECK(yarn.find(field) != std::string::npos);
}
