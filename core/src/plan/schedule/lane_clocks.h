#pragma once
// Which actions are done when another one runs: vector clocks, one entry a lane. An action's number on its lane is
// known to another action if a stream, an event or the host orders the two.

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "plan/schedule.h"

namespace quern {

class LaneClocks {
 public:
  /// By lane: the last action that is known to be done.
  using Clock = std::array<std::int64_t, kLanes>;
  /// `clock` then knows what the other one does.
  static void merge(Clock& clock, const Clock& other) {
    for (std::size_t i = 0; i < kLanes; ++i) clock[i] = std::max(clock[i], other[i]);
  }

  /// Begins a run with so many events, none of them recorded. Lanes go on where they are.
  void begin_run(std::int32_t events) {
    events_.assign(static_cast<std::size_t>(events), {});
    recorded_.assign(static_cast<std::size_t>(events), false);
  }
  /// Takes the next action of the run. False: it waits for an event that nobody recorded.
  bool enqueue(const Action& action) {
    Clock& lane = lanes_[static_cast<std::size_t>(action.lane)];
    // An action that the host has seen finish before it enqueues another has finished when that one runs.
    merge(lane, lanes_[static_cast<std::size_t>(Lane::host)]);
    const auto event = static_cast<std::size_t>(std::max(action.event, 0));
    switch (action.kind) {
      case ActionKind::wait:
        if (!recorded_[event]) return false;
        merge(lane, events_[event]);
        break;
      case ActionKind::record:
        events_[event] = lane;
        recorded_[event] = true;
        break;
      default: ++lane[static_cast<std::size_t>(action.lane)];
    }
    return true;
  }
  /// The host waits for everything.
  void synchronize() {
    for (const Clock& lane : lanes_) merge(lanes_[static_cast<std::size_t>(Lane::host)], lane);
  }
  /// What the action that a lane took last knows, itself included.
  const Clock& at(Lane lane) const { return lanes_[static_cast<std::size_t>(lane)]; }

 private:
  std::array<Clock, kLanes> lanes_{};
  std::vector<Clock> events_;
  std::vector<bool> recorded_;
};

}  // namespace quern
