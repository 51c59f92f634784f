// What counts against the limit, and what is a spike.
#include "run/guard.h"

#include <doctest/doctest.h>

using namespace quern;

TEST_CASE("failures are borne up to the limit, and forgotten when a window of steps went well behind the last") {
  Guard guard({.non_finite = "skip", .limit = 2, .spike_z = 0, .window = 5});
  CHECK(guard.failed(1) == NonFinite::skip);
  CHECK(guard.failed(3) == NonFinite::skip);
  for (std::int64_t step = 4; step < 8; ++step) guard.passed(step, 1, 1);
  CHECK(guard.failed(8) == NonFinite::stop);

  Guard again({.non_finite = "roll_back", .limit = 1, .spike_z = 0, .window = 5});
  CHECK(again.failed(10) == NonFinite::roll_back);
  for (std::int64_t step = 1; step < 15; ++step) again.passed(step, 1, 1);  // gone over once more, and not far beyond
  CHECK(Guard(again).failed(15) == NonFinite::stop);
  again.passed(15, 1, 1);
  CHECK(again.failed(16) == NonFinite::roll_back);

  CHECK(Guard({.non_finite = "stop", .limit = 9, .spike_z = 0, .window = 5}).failed(1) == NonFinite::stop);
  CHECK(Guard({.non_finite = "skip", .limit = 0, .spike_z = 0, .window = 5}).failed(1) == NonFinite::stop);
}

TEST_CASE("a spike is far above the window's mean, by its deviation, once the window is full") {
  Guard guard({.non_finite = "stop", .limit = 0, .spike_z = 4, .window = 4});
  CHECK(guard.passed(1, 100, 1).empty());  // nothing to compare with
  for (double loss : {2.0, 3.0, 2.0, 3.0}) CHECK(guard.passed(2, loss, 1).empty());
  CHECK(guard.passed(3, -50, 1).empty());  // below is none
  for (double loss : {2.0, 3.0, 2.0, 3.0}) CHECK(guard.passed(4, loss, 1).empty());
  auto spikes = guard.passed(5, 6, 2);
  REQUIRE(spikes.size() == 2);
  CHECK(spikes[0].what == "loss");
  CHECK(spikes[0].mean == doctest::Approx(2.5));
  CHECK(spikes[0].deviation == doctest::Approx(0.57735));
  CHECK(spikes[0].z == doctest::Approx(3.5 / 0.57735));
  CHECK(spikes[1].what == "grad_norm");  // a series that did not move at all
  CHECK(guard.passed(6, 3, 1.0).empty());
}
