#pragma once
// How long a schedule takes: its actions run over lanes at the device's stated or measured rates, each lane one action
// at a time, waiting for events as the schedule says.

#include <vector>

#include "plan/plan.h"

namespace quern {

/// Seconds from the schedule's start. A record or wait takes no time.
struct ActionTime {
  double begin = 0, end = 0;
};

/// By action. A launch takes its task's seconds, or the seconds of its operands in place in stores; a transfer to or
/// from the host its bytes at host_rate, and at duplex_rate while others go the other way, or at its store's own rate
/// if that is lower; a collective the bytes that
/// have to come over this rank's links at peer_rate, from when it comes to it: all ranks are taken to be alike.
std::vector<ActionTime> simulate(const ScheduleSet& set, const RunSchedule& schedule, const DeviceTraits& device);
/// Until the last action ends.
double simulated_seconds(const ScheduleSet& set, const RunSchedule& schedule, const DeviceTraits& device);

}  // namespace quern
