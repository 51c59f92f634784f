// The GPU's telemetry, and the message where there is none.
#include "runtime/telemetry.h"

#include <doctest/doctest.h>

#include "tests/device_pair.h"

using namespace quern;
using namespace quern::cuda;

TEST_CASE("clock event reasons are named, and idle and chosen clocks limit nothing") {
  CHECK(clock_limits(0).empty());
  CHECK(clock_limits(0x1 | 0x2 | 0x100).empty());
  CHECK(clock_limits(0x4) == std::vector<std::string>{"power limit"});
  CHECK(clock_limits(0x8 | 0x40) == std::vector<std::string>{"hardware slowdown", "temperature (halved)"});
}

TEST_CASE("a GPU that NVML does not know has no readings, with the reason") {
  Telemetry telemetry = GpuTelemetry("ffff:ff:1f.7").read();
  CHECK(telemetry.readings.empty());
  CHECK(telemetry.unavailable.find("NVML") == 0);
}

TEST_CASE("an open GPU tells its clocks, power and temperature") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  Telemetry telemetry = pair.gpu->telemetry();
  if (!telemetry.unavailable.empty()) {  // some containers leave NVML out
    MESSAGE("skipped: " << telemetry.unavailable);
    return;
  }
  for (const char* name : {"sm_clock", "power", "temperature"}) {
    CAPTURE(name);
    bool found = false;
    for (const Reading& reading : telemetry.readings) found = found || (reading.name == name && reading.value > 0);
    CHECK(found);
  }
}

TEST_CASE("ranges nest, with or without a profiler") {
  DevicePair pair = open_pair();
  pair.gpu->begin_range("outer");
  pair.gpu->begin_range("inner");
  pair.gpu->end_range();
  pair.gpu->end_range();
}
