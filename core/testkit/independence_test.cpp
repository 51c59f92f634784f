// The check finds what it is for: numbers that neighbours share.
#include "quern/testkit/independence.h"

#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include "quern/random.h"

using namespace quern;
using testkit::dependence;

namespace {

/// Uniform, of mean 0 and variance 1; element i is number index(i) of a stream.
template <class Index>
std::vector<double> drawn(Index index) {
  std::vector<double> numbers(1 << 17);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::uint32_t word = random_word({7}, 0, index(i));
    numbers[i] = (word / 0x1p32 - 0.5) * std::sqrt(12.0);
  }
  return numbers;
}

}  // namespace

TEST_CASE("independent numbers pass, shared ones are found at their distance") {
  const std::vector<double> own = drawn([](std::size_t i) { return i; });
  CHECK(dependence(own) == "");
  CHECK(dependence(own, drawn([](std::size_t i) { return i + (1 << 20); })) == "");
  CHECK(dependence(own, own) != "");
  auto finds = [](auto index, const char* what) {
    const std::string found = dependence(drawn(index));
    CAPTURE(found);
    CHECK(found.starts_with(what));
  };
  finds([](std::size_t i) { return i / 8; }, "the variance of means");
  finds([](std::size_t i) { return i / 2; }, "the variance of means");
  finds([](std::size_t i) { return i / 16 * 8 + i % 8; }, "the correlation at distance 8 ");
  finds([](std::size_t i) { return i / 32 * 16 + i % 16; }, "the correlation at distance 16 ");
  std::vector<double> biased = own;
  for (double& number : biased) number += 0.02;
  CHECK(dependence(biased).starts_with("the mean"));
  CHECK(dependence(std::vector<double>(1 << 17, 0.0)) != "");
}
