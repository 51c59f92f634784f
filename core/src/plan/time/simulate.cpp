#include "plan/time/simulate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

namespace quern {

namespace {

/// Bytes that a rank receives, and as many it sends: all but its own part. Of an all_reduce each part is sent to be
/// summed, and again as a sum. No way of doing it moves less.
double traffic_of(const OpInstance& op) {
  double in = 0, out = 0;
  for (const Operand& operand : op.inputs) in += static_cast<double>(operand.bytes());
  for (const Operand& operand : op.outputs) out += static_cast<double>(operand.bytes());
  const auto ranks = static_cast<double>(op.attributes.integer("ranks"));
  return (op.kind == "all_reduce" ? 2 : 1) * std::max(in, out) * (ranks - 1) / ranks;
}

/// What an action takes when nothing else uses the link between host and device, and which ways it uses that.
struct Work {
  double seconds = 0;
  bool in = false, out = false;
};

/// A launch, or as long as what it reads and writes of stores in place is on the link.
Work work_of(const RunSchedule& schedule, const Action& action, const Task& task, const DeviceTraits& device) {
  std::int64_t in = 0, out = 0;
  auto add = [](std::int64_t& bytes, const Access& access) {
    if (access.place.present() && access.place.space == Space::store) bytes += access.place.bytes;
  };
  const auto reads = schedule.reads(action), writes = schedule.writes(action);
  for (const Access& access : reads) add(in, access);
  for (const Access& access : writes) add(out, access);
  for (std::int32_t input : task.changed) add(out, reads[static_cast<std::size_t>(input)]);
  for (std::int32_t output : task.summed) add(in, writes[static_cast<std::size_t>(output)]);
  const double link = device.host_rate > 0 ? static_cast<double>(std::max(in, out)) / device.host_rate : 0;
  return link > task.seconds ? Work{link, in > 0, out > 0} : Work{task.seconds};
}

/// Of the store that a put or get is of; 0: no less than the link's.
double store_rate(const ScheduleSet& set, const Action& action, const Place& from, const Place& to) {
  if (action.kind == ActionKind::copy) return 0;
  const bool put = action.kind == ActionKind::put;
  const auto store = static_cast<std::size_t>((put ? to : from).index);
  if (store >= set.rates.size()) return 0;
  return put ? set.rates[store].put : set.rates[store].get;
}

Work work_of(const ScheduleSet& set, const RunSchedule& schedule, const Action& action, const DeviceTraits& device) {
  const auto reads = schedule.reads(action), writes = schedule.writes(action);
  auto seconds = [](auto bytes, double rate) { return rate > 0 ? static_cast<double>(bytes) / rate : 0; };
  auto task = [&]() -> const Task& { return set.task_of(action); };
  switch (action.kind) {
    case ActionKind::launch: return work_of(schedule, action, task(), device);
    case ActionKind::collective: return {seconds(traffic_of(task().instance), device.peer_rate)};
    case ActionKind::fill: return {seconds(writes[0].place.bytes, device.memory_rate)};
    case ActionKind::copy:
    case ActionKind::put:
    case ActionKind::get: {
      const Place &from = reads[0].place, &to = writes[0].place;
      const double link = seconds(from.bytes, device.host_rate);
      const double store = seconds(from.bytes, store_rate(set, action, from, to));
      if (store > link) return {store};
      if (from.space != Space::device) return {link, true, false};
      if (to.space != Space::device) return {link, false, true};
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
    bool busy = false;  // with the next one, of whose seconds so many are left, were it alone
    Work work = {};
    double left = 0;
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
      lane.work = work_of(set_, schedule_, action, device_);
      times_[number] = {now_, now_};
      lane.left = lane.work.seconds;
      lane.busy = lane.left > 0;
      lane.next += lane.busy ? 0 : 1;
      moved = true;
    }
    return moved;
  }

  /// Of what the lane's action would do alone. Transfers of one direction share it.
  double speed_of(const LaneState& lane) const {
    int in = 0, out = 0;
    for (const LaneState& other : lanes_) {
      in += other.busy && other.work.in;
      out += other.busy && other.work.out;
    }
    const int sharing = std::max({1, lane.work.in ? in : 0, lane.work.out ? out : 0});
    const bool slowed = (lane.work.in || lane.work.out) && in > 0 && out > 0 && device_.duplex_rate > 0;
    return (slowed ? device_.duplex_rate / device_.host_rate : 1) / sharing;
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
