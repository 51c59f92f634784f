// Formats are checked over all their values, and against a search for the nearest one.
#include "quern/numeric.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "quern/random.h"
#include "quern/testkit/independence.h"

using namespace quern;

namespace {

struct Format {
  const char* name;
  float (*decode)(std::uint8_t);
  std::uint8_t (*encode)(float);
  float largest, smallest;  // largest finite, smallest subnormal
};
const Format kFormats[] = {{"e4m3", e4m3_to_float, float_to_e4m3, 448.0f, 0x1p-9f},
                           {"e5m2", e5m2_to_float, float_to_e5m2, 57344.0f, 0x1p-16f}};

// Nearest finite value by search; ties go to the even code.
std::uint8_t nearest(const Format& format, float value) {
  int best = -1;
  double best_distance = 0;
  for (int code = 0; code < 0x80; ++code) {
    float candidate = format.decode(static_cast<std::uint8_t>(code));
    if (!std::isfinite(candidate)) continue;
    double distance = std::fabs(double{std::min(std::fabs(value), format.largest)} - candidate);
    if (best < 0 || distance < best_distance || (distance == best_distance && code % 2 == 0))
      best = code, best_distance = distance;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

}  // namespace

TEST_CASE("every 8-bit float survives decode and encode") {
  for (const Format& format : kFormats) {
    CAPTURE(format.name);
    for (int code = 0; code < 256; ++code) {
      float value = format.decode(static_cast<std::uint8_t>(code));
      CAPTURE(code);
      if (std::isnan(value))
        CHECK(std::isnan(format.decode(format.encode(value))));
      else if (std::isinf(value))
        CHECK(format.decode(format.encode(value)) == std::copysign(format.largest, value));
      else
        CHECK(int{format.encode(value)} == code);
    }
    CHECK(format.decode(0x01) == format.smallest);
  }
}

TEST_CASE("encoding takes the nearest value, ties to even, and saturates") {
  for (const Format& format : kFormats) {
    CAPTURE(format.name);
    std::vector<float> samples = {
        0.0f,   -0.0f, format.smallest / 2, format.smallest * 0.51f, format.smallest * 1.5f, format.largest * 1.01f,
        -1e30f, 1e-30f};
    for (int code = 0; code + 1 < 0x7c; ++code) {  // values and the midpoints between neighbours, where ties happen
      float low = format.decode(static_cast<std::uint8_t>(code)),
            high = format.decode(static_cast<std::uint8_t>(code + 1));
      if (std::isfinite(high))
        samples.push_back((low + high) / 2), samples.push_back(std::nextafter((low + high) / 2, high));
    }
    for (std::uint64_t i = 0; i < 20000; ++i) {
      std::uint32_t word = random_word({7}, 0, i);
      float sample = std::bit_cast<float>(word);
      if (std::isfinite(sample)) {
        int unused;
        samples.push_back(std::ldexp(std::frexp(sample, &unused), static_cast<int>(word % 36) - 18));
      }
    }
    for (float sample : samples) {
      CAPTURE(sample);
      CHECK(int{format.encode(sample)} == int{nearest(format, sample)});
    }
    CHECK(format.decode(format.encode(std::numeric_limits<float>::infinity())) == format.largest);
  }
}

TEST_CASE("bf16 rounds to nearest even and keeps infinities and NaN") {
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    auto bits = static_cast<std::uint16_t>(high);
    float value = bf16_to_float(bits);
    if (std::isnan(value))
      CHECK(std::isnan(bf16_to_float(float_to_bf16(value))));
    else
      CHECK(float_to_bf16(value) == bits);
    if (!std::isfinite(value) || (high & 0x7fff) >= 0x7f7f) continue;
    std::uint16_t tie = float_to_bf16(std::bit_cast<float>((high << 16) | 0x8000u));
    CHECK(tie % 2 == 0);
    CHECK(float_to_bf16(std::bit_cast<float>((high << 16) | 0x7fffu)) == bits);
    CHECK(float_to_bf16(std::bit_cast<float>((high << 16) | 0x8001u)) == bits + 1);
  }
}

TEST_CASE("stochastic bf16 rounding is unbiased") {
  const float value = 1.0f + 0x1p-7f * 0.3f;  // three tenths of the way between two neighbours
  double sum = 0;
  constexpr int kDraws = 200000;
  for (std::uint64_t i = 0; i < kDraws; ++i)
    sum += bf16_to_float(float_to_bf16_stochastic(value, random_word({3}, 1, i)));
  // Standard error: 2^-7 * sqrt(0.21 / draws) = 8e-6; five of them.
  CHECK(std::fabs(sum / kDraws - value) < 4e-5);
}

TEST_CASE("int8 rounds to nearest even and saturates symmetrically") {
  CHECK(float_to_i8(2.5f) == 2);
  CHECK(float_to_i8(3.5f) == 4);
  CHECK(float_to_i8(1000.0f) == 127);
  CHECK(float_to_i8(-1000.0f) == -127);
  CHECK(float_to_i8(std::nanf("")) == 0);
}

TEST_CASE("philox gives the published vectors and independent streams") {
  // Known answers of Random123 for philox4x32-10.
  auto zeros = detail::philox_rounds({0, 0, 0, 0}, 0, 0);
  CHECK(zeros == std::array<std::uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  auto ones = detail::philox_rounds({~0u, ~0u, ~0u, ~0u}, ~0u, ~0u);
  CHECK(ones == std::array<std::uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
  RandomKey key{1, RandomPurpose::init, 5};
  CHECK(random_word(key, 0, 9) != random_word({1, RandomPurpose::shuffle, 5}, 0, 9));
  CHECK(random_word(key, 0, 9) != random_word({1, RandomPurpose::init, 6}, 0, 9));
  CHECK(random_word(key, 0, 9) == random_block(key, 0, 2)[1]);
}

TEST_CASE("every element, step, purpose and object has a random number of its own") {
  // Of a word's 16 low bits, which stochastic rounding takes: uniform, scaled to mean 0 and variance 1.
  auto drawn = [](const RandomKey& key, std::uint32_t step) {
    std::vector<double> numbers(1 << 17);
    for (std::size_t i = 0; i < numbers.size(); ++i)
      numbers[i] = (((random_word(key, step, i) & 0xffffu) + 0.5) * 0x1p-16 - 0.5) * std::sqrt(12.0);
    return numbers;
  };
  const RandomKey key{17, RandomPurpose::round_master, 5};
  const std::vector<double> sequences[] = {drawn(key, 7),
                                           drawn(key, 8),
                                           drawn({17, RandomPurpose::round_moment1, 5}, 7),
                                           drawn({17, RandomPurpose::round_moment2, 5}, 7),
                                           drawn({17, RandomPurpose::round_master, 6}, 7),
                                           drawn({18, RandomPurpose::round_master, 5}, 7),
                                           drawn({17 | std::uint64_t{1} << 32, RandomPurpose::round_master, 5}, 7)};
  for (const std::vector<double>& a : sequences) {
    CHECK(testkit::dependence(a) == "");
    for (const std::vector<double>* b = &a + 1; b != std::end(sequences); ++b) CHECK(testkit::dependence(a, *b) == "");
  }
}
