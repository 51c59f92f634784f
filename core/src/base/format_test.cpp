#include "base/format.h"

#include <cmath>
#include <limits>

#include <doctest/doctest.h>

using namespace quern;

TEST_CASE("counts") {
  CHECK(format_count(0) == "0");
  CHECK(format_count(0.5) == "0.50");
  CHECK(format_count(999) == "999");
  CHECK(format_count(1000) == "1.00k");
  CHECK(format_count(3412) == "3.41k");
  CHECK(format_count(9994) == "9.99k");
  CHECK(format_count(9995) == "10.0k");
  CHECK(format_count(24512) == "24.5k");
  CHECK(format_count(99949) == "99.9k");
  CHECK(format_count(99950) == "100k");
  CHECK(format_count(999499) == "999k");
  CHECK(format_count(999500) == "1.00M");
  CHECK(format_count(999.7) == "1.00k");
  CHECK(format_count(1023000) == "1.02M");
  CHECK(format_count(494032768) == "494M");
  CHECK(format_count(1235814400) == "1.24B");
  CHECK(format_count(15e12) == "15.0T");
  CHECK(format_count(5e18) == "5000000T");
  CHECK(format_count(-3412) == "-3.41k");
  CHECK(format_count(std::nan("")).find("nan") != std::string::npos);
}

TEST_CASE("bytes") {
  CHECK(format_bytes(0) == "0 B");
  CHECK(format_bytes(1023) == "1023 B");
  CHECK(format_bytes(1024) == "1.0 KiB");
  CHECK(format_bytes(std::int64_t{3} << 29) == "1.5 GiB");
  CHECK(format_bytes(1048166) == "1.0 MiB");
  CHECK(format_bytes(640 << 20) == "640 MiB");
}

TEST_CASE("durations round up into the next unit and never show sixty of one") {
  CHECK(format_duration(0) == "0ms");
  CHECK(format_duration(0.12) == "120ms");
  CHECK(format_duration(0.9996) == "1.0s");
  CHECK(format_duration(3.21) == "3.2s");
  CHECK(format_duration(9.96) == "10s");
  CHECK(format_duration(59.7) == "1m00s");
  CHECK(format_duration(130) == "2m10s");
  CHECK(format_duration(3599.6) == "1h00m");
  CHECK(format_duration(3900) == "1h05m");
  CHECK(format_duration(86400 * 2 + 3 * 3600) == "2d03h");
  for (double unknown : {-1.0, std::nan(""), std::numeric_limits<double>::infinity(), 1e300})
    CHECK(format_duration(unknown) == "?");
}

TEST_CASE("fixed digits, and words for infinities and NaN") {
  CHECK(format_fixed(4.81234, 4) == "4.8123");
  CHECK(format_fixed(-0.5, 2) == "-0.50");
  CHECK(format_fixed(std::nan(""), 4) == "nan");
  CHECK(format_fixed(-std::numeric_limits<double>::infinity(), 4) == "-inf");
  CHECK(format_fixed(std::numeric_limits<double>::max(), 1).size() == 311);
}

TEST_CASE("lists have commas between") {
  CHECK(format_list({"a", "b c", ""}) == "a, b c, ");
  CHECK(format_list({"a"}, "none") == "a");
  CHECK(format_list({}, "none") == "none");
  CHECK(format_list({}).empty());
}
