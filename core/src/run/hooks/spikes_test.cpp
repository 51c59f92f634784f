// The rule that a spike meets.
#include "run/hooks/spikes.h"

#include <doctest/doctest.h>

using namespace quern;

TEST_CASE("a spike is far above the window's mean, by its deviation, once the window is full") {
  Spikes spikes_of({.non_finite = "stop", .limit = 0, .spike_z = 4, .window = 4});
  CHECK(spikes_of.judge(100, 1).empty());  // nothing to compare with
  for (double loss : {2.0, 3.0, 2.0, 3.0}) CHECK(spikes_of.judge(loss, 1).empty());
  CHECK(spikes_of.judge(-50, 1).empty());  // below is none
  for (double loss : {2.0, 3.0, 2.0, 3.0}) CHECK(spikes_of.judge(loss, 1).empty());
  auto spikes = spikes_of.judge(6, 2);
  REQUIRE(spikes.size() == 2);
  CHECK(spikes[0].what == "loss");
  CHECK(spikes[0].mean == doctest::Approx(2.5));
  CHECK(spikes[0].deviation == doctest::Approx(0.57735));
  CHECK(spikes[0].z == doctest::Approx(3.5 / 0.57735));
  CHECK(spikes[1].what == "grad_norm");  // a series that did not move at all
  CHECK(spikes_of.judge(3, 1.0).empty());
}
