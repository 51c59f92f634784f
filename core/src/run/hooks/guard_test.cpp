// What counts against the limit.
#include "run/hooks/guard.h"

#include <doctest/doctest.h>

using namespace quern;

TEST_CASE("failures are borne up to the limit, and forgotten when a window of steps went well behind the last") {
  Guard guard({.non_finite = "skip", .limit = 2, .spike_z = 0, .window = 5});
  CHECK(guard.failed(1) == Verdict::skip);
  CHECK(guard.failed(3) == Verdict::skip);
  for (std::int64_t step = 4; step < 8; ++step) guard.passed(step);
  CHECK(guard.failed(8) == Verdict::stop);

  Guard again({.non_finite = "roll_back", .limit = 1, .spike_z = 0, .window = 5});
  CHECK(again.failed(10) == Verdict::roll_back);
  for (std::int64_t step = 1; step < 15; ++step) again.passed(step);  // gone over once more, and not far beyond
  CHECK(Guard(again).failed(15) == Verdict::stop);
  again.passed(15);
  CHECK(again.failed(16) == Verdict::roll_back);

  CHECK(Guard({.non_finite = "stop", .limit = 9, .spike_z = 0, .window = 5}).failed(1) == Verdict::stop);
  CHECK(Guard({.non_finite = "skip", .limit = 0, .spike_z = 0, .window = 5}).failed(1) == Verdict::stop);
}
