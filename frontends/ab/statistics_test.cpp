#include "ab/statistics.h"

#include <cmath>

#include <doctest/doctest.h>

using namespace quern;
using namespace quern::ab;

TEST_CASE("mean, deviation and median, and NaN where there is none") {
  CHECK(mean_of({1, 2, 6}) == 3);
  CHECK(deviation_of({1, 2, 6}) == doctest::Approx(std::sqrt(7.0)));
  CHECK(deviation_of({4, 4, 4}) == 0);
  CHECK(median_of({5, 1, 3}) == 3);
  CHECK(median_of({5, 1, 3, 4}) == 3.5);
  CHECK(range_of({5, 1, 3}).low == 1);
  CHECK(range_of({5, 1, 3}).high == 5);
  CHECK(std::isnan(mean_of({})));
  CHECK(std::isnan(median_of({})));
  CHECK(std::isnan(deviation_of({1})));
  CHECK(std::isnan(range_of({}).low));
  CHECK(std::isnan(median_interval({{}, {}}).high));
}

TEST_CASE("the interval of the median is the same each time, and is within the samples around the median") {
  std::vector<std::vector<double>> groups{{}, {}};
  for (int i = 0; i < 50; ++i) groups[static_cast<std::size_t>(i % 2)].push_back(100 + i % 7);
  Interval one = median_interval(groups), two = median_interval(groups);
  CHECK(one.low == two.low);
  CHECK(one.high == two.high);
  CHECK(one.low >= 101);
  CHECK(one.low <= 103);
  CHECK(one.high >= 103);
  CHECK(one.high <= 105);
  Interval alone = median_interval({{7}});
  CHECK(alone.low == 7);
  CHECK(alone.high == 7);
}

TEST_CASE("runs that differ from each other widen the interval, however many steps each has") {
  std::vector<double> slow(100, 10.0), fast(100, 20.0);
  Interval interval = median_interval({slow, fast});
  CHECK(interval.low == 10);
  CHECK(interval.high == 20);
}
