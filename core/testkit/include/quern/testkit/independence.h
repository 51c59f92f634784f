#pragma once
// Whether numbers that should be drawn independently are: checks of what a generator gives, and of what rounding makes
// of it. Numbers are scaled to mean 0 and variance 1. A text names the first finding of more than 5 standard errors;
// empty when there is none. Draws of fixed seeds pass or fail for good.

#include <span>
#include <string>

namespace quern::testkit {

/// The mean, the variance of means of 8 neighbours, which is an eighth where they are independent, and the correlation
/// of neighbours at distances 1 to 16.
std::string dependence(std::span<const double> numbers);

/// The correlation of numbers at the same place.
std::string dependence(std::span<const double> a, std::span<const double> b);

}  // namespace quern::testkit
