#pragma once
// Schedules for people: one line an action, and as a timeline for Perfetto or chrome://tracing.

#include <string>
#include <string_view>
#include <vector>

#include "base/files/descriptor.h"
#include "plan/plan.h"
#include "plan/time/simulate.h"

namespace quern {

/// Every run that the plan has, or only the one of that name; an unknown name is a config error.
///   "  12  compute  launch  matmul qkv, layer 0   1.2 GB  0.41 ms  reads ...  writes ..."
std::string show_schedules(const Plan& plan, const DeviceTraits& device, std::string_view run);

/// A bar of a timeline.
struct TimelineEvent {
  std::string name, run;
  Lane lane = Lane::compute;
  double begin = 0, seconds = 0;
};
/// Adds a run's actions, which take these times from `begin` on, and its waits for what stores have. When the last
/// ends.
double add_events(std::vector<TimelineEvent>& events, const Plan& plan, Run run, const std::vector<ActionTime>& times,
                  double begin);
/// Of one step with two micro-batches, as simulated.
std::vector<TimelineEvent> simulated_timeline(const Plan& plan, const DeviceTraits& device);
inline constexpr FileKind kTimelineFile{"a timeline of quern",
                                        R"({"displayTimeUnit":"ms","otherData":{"made_by":"quern"})"};
/// The trace-event format, one thread a lane, microseconds; begins as kTimelineFile says.
std::string timeline_json(const std::vector<TimelineEvent>& events, std::string_view title);

}  // namespace quern
