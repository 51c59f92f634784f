#pragma once
// The few statistics that comparing runs takes. What cannot be had from the values given is NaN.

#include <vector>

#include "base/median.h"

namespace quern::ab {

double mean_of(const std::vector<double>& values);
/// Sample standard deviation (n - 1); NaN for fewer than two values.
double deviation_of(const std::vector<double>& values);

struct Interval {
  double low, high;
};

/// Smallest and largest.
Interval range_of(const std::vector<double>& values);

/// 95% interval of the median of all samples, by bootstrap over groups and, within each, over samples: a run's steps
/// resemble each other more than another run's. The same samples give the same interval.
Interval median_interval(const std::vector<std::vector<double>>& groups);

}  // namespace quern::ab
