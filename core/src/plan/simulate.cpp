#include "plan/simulate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

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

/// Which way an action uses the link between host and device.
enum class Link : std::uint8_t { none, in, out };

/// What an action takes when nothing else uses the link.
struct Work {
  double seconds = 0;
  Link link = Link::none;
};

Work work_of(const ScheduleSet& set, const RunSchedule& schedule, const Action& action, const DeviceTraits& device) {
  const auto reads = schedule.reads(action), writes = schedule.writes(action);
  auto seconds = [](auto bytes, double rate) { return rate > 0 ? static_cast<double>(bytes) / rate : 0; };
  auto task = [&]() -> const Task& { return set.tasks[static_cast<std::size_t>(action.task)]; };
  switch (action.kind) {
    case ActionKind::launch: return {task().seconds};
    case ActionKind::collective: return {seconds(traffic_of(task().instance), device.peer_rate)};
    case ActionKind::fill: return {seconds(writes[0].place.bytes, device.memory_rate)};
    case ActionKind::copy:
    case ActionKind::put:
    case ActionKind::get: {
      const Place &from = reads[0].place, &to = writes[0].place;
      if (from.space != Space::device) return {seconds(from.bytes, device.host_rate), Link::in};
      if (to.space != Space::device) return {seconds(from.bytes, device.host_rate), Link::out};
      return {seconds(2 * from.bytes, device.memory_rate)};
    }
    default: return {};
  }
}

/// Goes from one action's end to the next, since transfers slow each other down while they overlap.
class Simulation {
 public:
  Simulation(const ScheduleSet& set, const RunSchedule& schedule, const DeviceTraits& device)
      : set_(set),
        schedule_(schedule),
        device_(device),
        times_(schedule.actions.size()),
        recorded_(static_cast<std::size_t>(schedule.events), false) {
    for (std::size_t i = 0; i < schedule.actions.size(); ++i)
      lanes_[static_cast<std::size_t>(schedule.actions[i].lane)].actions.push_back(i);
  }

  std::vector<ActionTime> run() {
    while (start()) advance();
    return std::move(times_);
  }

 private:
  struct LaneState {
    std::vector<std::size_t> actions = {};
    std::size_t next = 0;
    bool busy = false;  // with the next one, of which so many seconds are left, were it alone
    double left = 0;
    Link link = Link::none;
  };

  // Starts all that can start, and says whether anything runs.
  bool start() {
    for (bool moved = true; moved;) {
      moved = false;
      for (LaneState& lane : lanes_) moved = start(lane) || moved;
    }
    return std::any_of(lanes_.begin(), lanes_.end(), [](const LaneState& lane) { return lane.busy; });
  }

  bool start(LaneState& lane) {
    bool moved = false;
    while (!lane.busy && lane.next < lane.actions.size()) {
      const std::size_t number = lane.actions[lane.next];
      const Action& action = schedule_.actions[number];
      const auto event = static_cast<std::size_t>(std::max(action.event, 0));
      if (action.kind == ActionKind::wait && !recorded_[event]) break;
      if (action.kind == ActionKind::record) recorded_[event] = true;
      const Work work = work_of(set_, schedule_, action, device_);
      times_[number] = {now_, now_};
      lane.busy = work.seconds > 0;
      lane.left = work.seconds;
      lane.link = work.link;
      lane.next += lane.busy ? 0 : 1;
      moved = true;
    }
    return moved;
  }

  /// Of what the lane's action would do alone. Transfers of one direction share it.
  double speed_of(const LaneState& lane) const {
    if (lane.link == Link::none) return 1;
    auto busy = [this](Link link) {
      return std::count_if(lanes_.begin(), lanes_.end(),
                           [link](const LaneState& other) { return other.busy && other.link == link; });
    };
    const bool both = busy(Link::in) > 0 && busy(Link::out) > 0 && device_.duplex_rate > 0;
    return (both ? device_.duplex_rate / device_.host_rate : 1) / static_cast<double>(busy(lane.link));
  }

  // To the end of the next action that ends.
  void advance() {
    std::array<double, kLanes> needed{};
    double least = INFINITY;
    for (std::size_t i = 0; i < kLanes; ++i) {
      if (!lanes_[i].busy) continue;
      needed[i] = lanes_[i].left / speed_of(lanes_[i]);
      least = std::min(least, needed[i]);
    }
    now_ += least;
    for (std::size_t i = 0; i < kLanes; ++i) {
      LaneState& lane = lanes_[i];
      if (!lane.busy) continue;
      lane.left *= 1 - least / needed[i];
      times_[lane.actions[lane.next]].end = now_;
      if (needed[i] > least) continue;
      lane.busy = false;
      ++lane.next;
    }
  }

  const ScheduleSet& set_;
  const RunSchedule& schedule_;
  const DeviceTraits& device_;
  std::vector<ActionTime> times_;
  std::vector<bool> recorded_;  // by event
  std::array<LaneState, kLanes> lanes_;
  double now_ = 0;
};

}  // namespace

std::vector<ActionTime> simulate(const ScheduleSet& set, const RunSchedule& schedule, const DeviceTraits& device) {
  return Simulation(set, schedule, device).run();
}

double simulated_seconds(const ScheduleSet& set, const RunSchedule& schedule, const DeviceTraits& device) {
  double seconds = 0;
  for (const ActionTime& time : simulate(set, schedule, device)) seconds = std::max(seconds, time.end);
  return seconds;
}

}  // namespace quern
