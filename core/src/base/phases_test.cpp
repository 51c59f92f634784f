#include "base/phases.h"

#include <chrono>
#include <thread>

#include <doctest/doctest.h>

#include "base/clock.h"

using namespace quern;

TEST_CASE("phases have the seconds between them, and a part split off is taken from the phase under way") {
  auto pass = [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
  Phases phases;
  CHECK(phases.total() == 0);
  const double begin = now();
  phases.enter("plan");
  pass();
  phases.enter("kernels");
  pass();
  phases.split("memory", 1e-3);
  phases.enter("plan");
  pass();
  phases.leave();
  const double end = now();
  pass();
  phases.leave();
  REQUIRE(phases.all().size() == 3);
  CHECK(phases.all()[0].first == "plan");
  CHECK(phases.all()[0].second >= 4e-3);
  CHECK(phases.all()[1].first == "kernels");
  CHECK(phases.all()[1].second >= 1e-3);
  CHECK(phases.all()[2].first == "memory");
  CHECK(phases.all()[2].second == 1e-3);
  CHECK(phases.total() <= end - begin);
  CHECK(phases.total() >= 6e-3);
  CHECK(phases.text().find(": plan 0.") != std::string::npos);
  CHECK(phases.text().find(", memory 0.0") != std::string::npos);
}
