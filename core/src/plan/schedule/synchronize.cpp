#include "plan/schedule/synchronize.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "plan/byte_ranges.h"
#include "plan/schedule/lane_clocks.h"

namespace quern {

namespace {

using Clock = LaneClocks::Clock;  // by lane: the last unit that is known to be done
// Units' numbers begin at 1; `kBefore` stands for all actions before the run.
constexpr std::int64_t kBefore = 0, kNothing = -1;

struct Touch {
  Place place;
  bool writes = false;
};

bool between_runs(const Place& place) { return place.space == Space::device || place.space == Space::store; }

template <class Visit>
void each_touch(const ScheduleSet& set, const RunSchedule& schedule, const Action& action, Visit visit) {
  auto present = [&](const Access& access, bool writes) {
    if (access.place.present() && access.place.bytes > 0) visit(Touch{access.place, writes});
  };
  const auto reads = schedule.reads(action);
  for (const Access& access : reads) present(access, false);
  for (const Access& access : schedule.writes(action)) present(access, true);
  if (action.task < 0) return;
  const Task& task = set.task_of(action);
  for (std::int32_t input : task.changed) present(reads[static_cast<std::size_t>(input)], true);
}

/// An action, or consecutive ones of the compute lane that wait, and are waited for, together.
struct Unit {
  Lane lane = Lane::compute;
  std::size_t begin = 0, end = 0;
  std::int64_t number = 0;  ///< on its lane
  Clock known = {};         ///< when it is done
  std::vector<Unit*> awaits = {};
  bool awaited = false;
  std::int32_t event = -1;  ///< recorded behind it
};

std::vector<Unit> units_of(const RunSchedule& schedule) {
  std::vector<Unit> units;
  std::array<std::int64_t, kLanes> numbers{};
  for (std::size_t i = 0; i < schedule.actions.size(); ++i) {
    const Action& action = schedule.actions[i];
    const bool joins = !units.empty() && action.lane == Lane::compute && units.back().lane == Lane::compute &&
                       action.window >= 0 && schedule.actions[i - 1].window == action.window;
    if (!joins)
      units.push_back({.lane = action.lane, .begin = i, .number = ++numbers[static_cast<std::size_t>(action.lane)]});
    units.back().end = i + 1;
  }
  return units;
}

using Memory = std::pair<Space, std::int32_t>;

/// What of the memories some actions touch.
class Touched {
 public:
  void add(const Touch& touch) {
    add(all_, touch.place);
    if (touch.writes) add(written_, touch.place);
  }
  /// Behind the last `add`.
  void sort() {
    sort(all_);
    sort(written_);
  }
  /// Whether an action that touches this has to be ordered with them.
  bool conflicts(const Touch& touch) const { return meets(touch.writes ? all_ : written_, touch.place); }
  bool touches(const Place& place) const { return meets(all_, place); }
  bool empty() const { return all_.empty(); }

 private:
  struct Range {
    Memory memory;
    std::int64_t begin = 0, end = 0;
  };
  using Ranges = std::vector<Range>;

  static void add(Ranges& ranges, const Place& place) {
    ranges.push_back({{place.space, place.index}, place.offset, place.offset + place.bytes});
  }
  // Apart from each other, in order.
  static void sort(Ranges& ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
      return std::pair(a.memory, a.begin) < std::pair(b.memory, b.begin);
    });
    std::size_t kept = 0;
    for (const Range& range : ranges) {
      Range* last = kept > 0 ? &ranges[kept - 1] : nullptr;
      if (last && last->memory == range.memory && range.begin <= last->end)
        last->end = std::max(last->end, range.end);
      else
        ranges[kept++] = range;
    }
    ranges.resize(kept);
  }
  static bool meets(const Ranges& ranges, const Place& place) {
    const Memory memory{place.space, place.index};
    const auto behind =
        std::upper_bound(ranges.begin(), ranges.end(), std::pair(memory, place.offset + place.bytes - 1),
                         [](const auto& at, const Range& range) { return at < std::pair(range.memory, range.begin); });
    if (behind == ranges.begin()) return false;
    const Range& last = *std::prev(behind);
    return last.memory == memory && last.end > place.offset;
  }

  Ranges all_, written_;
};

/// What runs leave under way: by lane, what its last actions touch that the compute lane does not wait for.
using LeftOver = std::array<Touched, kLanes>;

class Synchronizer {
 public:
  Synchronizer(const ScheduleSet& set, const RunSchedule& schedule, const LeftOver& before)
      : set_(set), schedule_(schedule), before_(before), units_(units_of(schedule)) {
    for (int lane = 0; lane < kLanes; ++lane) {
      known_[static_cast<std::size_t>(lane)].fill(kNothing);
      known_[static_cast<std::size_t>(lane)][static_cast<std::size_t>(lane)] = kBefore;
      starts_[static_cast<std::size_t>(lane)] = {.lane = static_cast<Lane>(lane),
                                                 .known = known_[static_cast<std::size_t>(lane)]};
    }
    each_side_touch([&](const Unit&, const Touch& touch) { beside_.add(touch); });
    beside_.sort();
    for (Unit& unit : units_) {
      order(unit);
      by_lane_[static_cast<std::size_t>(unit.lane)].push_back(&unit);
    }
    const std::vector<Unit*>& met = by_lane_[static_cast<std::size_t>(Lane::communication)];
    if (!met.empty() && !knows(Lane::compute, *met.back())) joined_ = met.back();
    if (joined_) joined_->awaited = true;
  }

  /// What of it goes on when the compute lane is done.
  void leave(LeftOver& left) const {
    each_side_touch([&](const Unit& unit, const Touch& touch) {
      const bool joined = unit.lane == Lane::communication || knows(Lane::compute, unit);
      if (!joined && between_runs(touch.place)) left[static_cast<std::size_t>(unit.lane)].add(touch);
    });
  }

  RunSchedule run() {
    RunSchedule to = schedule_.anew();
    auto add = [&](ActionKind kind, Lane lane, std::int32_t event) {
      to.add({.kind = kind, .lane = lane, .event = event}, {}, {});
    };
    // Events get their numbers in the order of their records.
    auto record = [&](Unit& unit) {
      if (!unit.awaited) return;
      unit.event = to.events++;
      add(ActionKind::record, unit.lane, unit.event);
    };
    for (Unit& unit : starts_) record(unit);
    for (Unit& unit : units_) {
      for (const Unit* other : unit.awaits) add(ActionKind::wait, unit.lane, other->event);
      for (std::size_t i = unit.begin; i < unit.end; ++i)
        to.add(schedule_.actions[i], schedule_.reads(schedule_.actions[i]), schedule_.writes(schedule_.actions[i]));
      record(unit);
    }
    if (joined_) add(ActionKind::wait, Lane::compute, joined_->event);
    return to;
  }

 private:
  struct Bytes {
    int lane = 0;  // of the last write
    std::int64_t write = kNothing;
    Clock reads = none();  // the last on each lane since
  };
  static Clock none() {
    Clock clock;
    clock.fill(kNothing);
    return clock;
  }

  template <class Visit>
  void each_side_touch(Visit visit) const {
    for (const Unit& unit : units_)
      for (std::size_t i = unit.begin; i < unit.end && unit.lane != Lane::compute; ++i)
        each_touch(set_, schedule_, schedule_.actions[i], [&](const Touch& touch) { visit(unit, touch); });
  }

  bool knows(Lane lane, const Unit& unit) const {
    return known_[static_cast<std::size_t>(lane)][static_cast<std::size_t>(unit.lane)] >= unit.number;
  }
  void order(Unit& unit) {
    const auto lane = static_cast<std::size_t>(unit.lane);
    Clock& known = known_[lane];
    // Actions that the host has seen complete before it enqueues this.
    LaneClocks::merge(known, known_[static_cast<std::size_t>(Lane::host)]);
    const Clock needed = this->needed(unit);
    // The one that was enqueued last first: it may know the others.
    std::vector<Unit*> others;
    for (std::size_t other = 0; other < kLanes; ++other)
      if (other != lane && needed[other] > known[other]) others.push_back(unit_of(other, needed[other]));
    std::sort(others.begin(), others.end(), [](const Unit* a, const Unit* b) { return a->end > b->end; });
    for (Unit* other : others) {
      if (knows(unit.lane, *other)) continue;
      unit.awaits.push_back(other);
      other->awaited = true;
      LaneClocks::merge(known, other->known);
    }
    known[lane] = unit.number;
    unit.known = known;
    touch(unit);
  }

  /// By lane, the last unit that has to be done before this one.
  Clock needed(const Unit& unit) {
    Clock needed = none();
    auto need = [&](std::size_t lane, std::int64_t number) { needed[lane] = std::max(needed[lane], number); };
    for (std::size_t i = unit.begin; i < unit.end; ++i) {
      each_touch(set_, schedule_, schedule_.actions[i], [&](const Touch& touch) {
        if (between_runs(touch.place)) {
          if (unit.lane != Lane::compute) need(static_cast<std::size_t>(Lane::compute), kBefore);
          for (std::size_t lane = 0; lane < kLanes; ++lane)
            if (before_[lane].conflicts(touch)) need(lane, kBefore);
        }
        if (!tracked(unit, touch.place)) return;
        memory_[{touch.place.space, touch.place.index}].visit(
            touch.place.offset, touch.place.offset + touch.place.bytes, [&](const Bytes& bytes) {
              need(static_cast<std::size_t>(bytes.lane), bytes.write);
              for (std::size_t lane = 0; lane < kLanes && touch.writes; ++lane) need(lane, bytes.reads[lane]);
            });
      });
      if (const std::optional<std::int32_t> task = exclusive_task(schedule_.actions[i]))
        if (const auto last = alone_.find(*task); last != alone_.end()) need(last->second.first, last->second.second);
    }
    return needed;
  }

  void touch(const Unit& unit) {
    const auto lane = static_cast<std::size_t>(unit.lane);
    for (std::size_t i = unit.begin; i < unit.end; ++i) {
      each_touch(set_, schedule_, schedule_.actions[i], [&](const Touch& touch) {
        if (!tracked(unit, touch.place)) return;
        ByteRanges<Bytes>& ranges = memory_[{touch.place.space, touch.place.index}];
        const std::int64_t begin = touch.place.offset, end = begin + touch.place.bytes;
        if (touch.writes) return ranges.set(begin, end, {.lane = static_cast<int>(lane), .write = unit.number});
        std::int64_t at = begin;  // bytes that nothing has touched yet become ranges too
        std::vector<std::pair<std::int64_t, std::int64_t>> gaps;
        for (auto it = ranges.cut(begin, end); it != ranges.end() && it->first < end; ++it) {
          if (it->first > at) gaps.emplace_back(at, it->first);
          it->second.known.reads[lane] = unit.number;
          at = it->second.end;
        }
        if (at < end) gaps.emplace_back(at, end);
        Bytes read;
        read.reads[lane] = unit.number;
        for (const auto& [from, to] : gaps) ranges.set(from, to, read);
      });
      if (const std::optional<std::int32_t> task = exclusive_task(schedule_.actions[i]))
        alone_[*task] = {lane, unit.number};
    }
  }

  /// What the compute lane alone touches needs no event.
  bool tracked(const Unit& unit, const Place& place) const {
    return unit.lane != Lane::compute || beside_.touches(place);
  }
  std::optional<std::int32_t> exclusive_task(const Action& action) const {
    const bool alone = action.task >= 0 && set_.task_of(action).exclusive;
    return alone ? std::optional(action.task) : std::nullopt;
  }
  Unit* unit_of(std::size_t lane, std::int64_t number) {
    return number == kBefore ? &starts_[lane] : by_lane_[lane][static_cast<std::size_t>(number - 1)];
  }

  const ScheduleSet& set_;
  const RunSchedule& schedule_;
  const LeftOver& before_;
  std::vector<Unit> units_;
  std::array<Unit, kLanes> starts_;                 // all that each lane did before the run
  std::array<std::vector<Unit*>, kLanes> by_lane_;  // the ordered ones of `units_`
  Unit* joined_ = nullptr;                          // for which the compute lane waits at the end
  Touched beside_;                                  // by other lanes than compute
  std::array<Clock, kLanes> known_{};
  std::map<Memory, ByteRanges<Bytes>> memory_;
  std::map<std::int32_t, std::pair<std::size_t, std::int64_t>> alone_;  // by exclusive task: lane and unit
};

}  // namespace

void synchronize(ScheduleSet& set) {
  const LeftOver nothing;
  LeftOver left;
  auto has = [](const RunSchedule& schedule, auto&& takes) {
    return std::any_of(schedule.actions.begin(), schedule.actions.end(),
                       [&](const Action& action) { return takes(action.lane); });
  };
  for (const RunSchedule& schedule : set.runs)
    if (has(schedule, [](Lane lane) { return lane == Lane::copy_in || lane == Lane::copy_out; }))
      Synchronizer(set, schedule, nothing).leave(left);
  for (Touched& touched : left) touched.sort();
  const bool any_left = std::any_of(left.begin(), left.end(), [](const Touched& touched) { return !touched.empty(); });
  for (RunSchedule& schedule : set.runs)
    if (has(schedule, [&](Lane lane) { return any_left || lane != Lane::compute; }))
      schedule = Synchronizer(set, schedule, left).run();
}

}  // namespace quern
