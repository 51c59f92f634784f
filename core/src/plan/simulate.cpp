#include "plan/simulate.h"

#include <algorithm>
#include <array>

#include "plan/estimate.h"

namespace quern {

namespace {

double action_seconds(const ScheduleSet& set, const RunSchedule& schedule, const Action& action,
                      const DeviceTraits& device) {
  if (action.kind == ActionKind::launch)
    return cost_seconds(set.tasks[static_cast<std::size_t>(action.task)].cost, device);
  std::int64_t bytes = 0;
  bool host = false;
  for (const Access& access : schedule.reads(action)) {
    bytes += access.place.bytes;
    host = host || access.place.space != Space::device;
  }
  for (const Access& access : schedule.writes(action)) {
    if (access.place.space == Space::device) bytes += access.place.bytes;
    host = host || access.place.space != Space::device;
  }
  if (action.kind != ActionKind::copy && action.kind != ActionKind::fill) return 0;
  if (host) return device.host_rate > 0 ? static_cast<double>(bytes) / 2 / device.host_rate : 0;
  return device.memory_rate > 0 ? static_cast<double>(bytes) / device.memory_rate : 0;
}

}  // namespace

std::vector<ActionTime> simulate(const ScheduleSet& set, const RunSchedule& schedule, const DeviceTraits& device) {
  std::vector<ActionTime> times;
  times.reserve(schedule.actions.size());
  std::array<double, kLanes> lanes{};
  std::vector<double> events(static_cast<std::size_t>(schedule.events), 0.0);
  for (const Action& action : schedule.actions) {
    double& lane = lanes[static_cast<std::size_t>(action.lane)];
    const auto event = static_cast<std::size_t>(std::max(action.event, 0));
    if (action.kind == ActionKind::wait) lane = std::max(lane, events[event]);
    const double begin = lane;
    lane += action_seconds(set, schedule, action, device);
    if (action.kind == ActionKind::record) events[event] = lane;
    times.push_back({begin, lane});
  }
  return times;
}

double simulated_seconds(const ScheduleSet& set, const RunSchedule& schedule, const DeviceTraits& device) {
  double seconds = 0;
  for (const ActionTime& time : simulate(set, schedule, device)) seconds = std::max(seconds, time.end);
  return seconds;
}

}  // namespace quern
