#include "plan/simulate.h"

#include <algorithm>
#include <array>

#include "plan/estimate.h"

namespace quern {

namespace {

/// Bytes that a rank receives, and as many it sends: what is not its own part. Of an all_reduce each part is sent to be
/// summed, and again as a sum. No way of doing it moves less.
double traffic_of(const OpInstance& op) {
  double in = 0, out = 0;
  for (const Operand& operand : op.inputs) in += static_cast<double>(operand.bytes());
  for (const Operand& operand : op.outputs) out += static_cast<double>(operand.bytes());
  const auto ranks = static_cast<double>(op.attributes.integer("ranks"));
  return (op.kind == "all_reduce" ? 2 : 1) * std::max(in, out) * (ranks - 1) / ranks;
}

double action_seconds(const ScheduleSet& set, const RunSchedule& schedule, const Action& action,
                      const DeviceTraits& device) {
  const auto reads = schedule.reads(action), writes = schedule.writes(action);
  auto seconds = [](auto bytes, double rate) { return rate > 0 ? static_cast<double>(bytes) / rate : 0; };
  auto task = [&]() -> const Task& { return set.tasks[static_cast<std::size_t>(action.task)]; };
  switch (action.kind) {
    case ActionKind::launch: return cost_seconds(task().cost, device);
    case ActionKind::collective: return seconds(traffic_of(task().instance), device.peer_rate);
    case ActionKind::fill: return seconds(writes[0].place.bytes, device.memory_rate);
    case ActionKind::copy:
    case ActionKind::put:
    case ActionKind::get: {
      const Place &from = reads[0].place, &to = writes[0].place;
      const bool inside = from.space == Space::device && to.space == Space::device;
      return inside ? seconds(2 * from.bytes, device.memory_rate) : seconds(from.bytes, device.host_rate);
    }
    default: return 0;
  }
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
