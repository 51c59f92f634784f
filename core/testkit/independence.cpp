#include "quern/testkit/independence.h"

#include <cmath>

namespace quern::testkit {

namespace {

constexpr double kLimit = 5;  ///< standard errors
constexpr std::size_t kGroup = 8, kFarthest = 16;

/// `deviation` in standard errors of what independent numbers give. NaN, of too few numbers, is a finding.
std::string finding(const std::string& what, double deviation) {
  if (std::fabs(deviation) < kLimit) return {};
  return what + " is " + std::to_string(deviation) + " standard errors off, of " + std::to_string(kLimit) + " allowed";
}

double correlation(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum / std::sqrt(static_cast<double>(a.size()));
}

/// The mean over groups of 8 mean^2, which should be 1; its standard error is taken from its own spread.
double group_excess(std::span<const double> numbers) {
  const std::size_t groups = numbers.size() / kGroup;
  double sum = 0, squares = 0;
  for (std::size_t group = 0; group < groups; ++group) {
    double total = 0;
    for (double number : numbers.subspan(group * kGroup, kGroup)) total += number;
    const double square = total * total / kGroup;
    sum += square;
    squares += square * square;
  }
  const auto count = static_cast<double>(groups);
  const double mean = sum / count;
  return (mean - 1) / std::sqrt((squares / count - mean * mean) / count);
}

}  // namespace

std::string dependence(std::span<const double> numbers) {
  double sum = 0;
  for (double number : numbers) sum += number;
  std::string found = finding("the mean", sum / std::sqrt(static_cast<double>(numbers.size())));
  if (found.empty()) found = finding("the variance of means of 8 neighbours", group_excess(numbers));
  for (std::size_t lag = 1; lag <= kFarthest && found.empty(); ++lag)
    found = finding("the correlation at distance " + std::to_string(lag),
                    correlation(numbers.first(numbers.size() - lag), numbers.subspan(lag)));
  return found;
}

std::string dependence(std::span<const double> a, std::span<const double> b) {
  return finding("the correlation at the same place", correlation(a, b));
}

}  // namespace quern::testkit
