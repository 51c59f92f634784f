#include "ab/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace quern::ab {

namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr int kDraws = 1000;

}  // namespace

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (double value : values) sum += value;
  return values.empty() ? kNone : sum / static_cast<double>(values.size());
}

double deviation_of(const std::vector<double>& values) {
  if (values.size() < 2) return kNone;
  double mean = mean_of(values), sum = 0;
  for (double value : values) sum += (value - mean) * (value - mean);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

Interval range_of(const std::vector<double>& values) {
  if (values.empty()) return {kNone, kNone};
  auto [low, high] = std::minmax_element(values.begin(), values.end());
  return {*low, *high};
}

Interval median_interval(const std::vector<std::vector<double>>& groups) {
  std::vector<const std::vector<double>*> filled;
  for (const auto& group : groups)
    if (!group.empty()) filled.push_back(&group);
  if (filled.empty()) return {kNone, kNone};
  std::vector<double> medians, sample;
  std::mt19937_64 random;  // with its default seed
  auto below = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  for (int draw = 0; draw < kDraws; ++draw) {
    sample.clear();
    for (std::size_t i = 0; i < filled.size(); ++i) {
      const std::vector<double>& group = *filled[below(filled.size())];
      for (std::size_t j = 0; j < group.size(); ++j) sample.push_back(group[below(group.size())]);
    }
    medians.push_back(median_of(sample));
  }
  std::sort(medians.begin(), medians.end());
  return {medians[kDraws * 25 / 1000], medians[kDraws * 975 / 1000 - 1]};
}

}  // namespace quern::ab
