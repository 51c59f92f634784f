#include "plan/laws/poison.h"

#include <algorithm>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "plan/schedule/lane_clocks.h"

namespace quern {

namespace {

constexpr std::uint8_t kPoison = 0xFF;

/// The last use of a value, in the order in which actions are enqueued.
struct Use {
  std::size_t action = 0;
  LaneClocks::Clock uses{};  // the last on each lane
  bool behind_all = true;    // it runs when all others are done
};

std::map<std::int32_t, Use> last_uses(const RunSchedule& schedule) {
  std::map<std::int32_t, Use> last;
  LaneClocks clocks;
  clocks.begin_run(schedule.events);
  for (std::size_t i = 0; i < schedule.actions.size(); ++i) {
    const Action& action = schedule.actions[i];
    clocks.enqueue(action);
    const LaneClocks::Clock& now = clocks.at(action.lane);
    for (const Access& access : schedule.operands_of(action)) {
      if (!access.place.present() || access.value < 0) continue;
      Use& use = last[access.value];
      use.action = i;
      use.behind_all = std::equal(use.uses.begin(), use.uses.end(), now.begin(), std::less_equal<>());
      use.uses[static_cast<std::size_t>(action.lane)] = now[static_cast<std::size_t>(action.lane)];
    }
  }
  return last;
}

/// The parts of the places outside `taken`.
void cut_out(std::vector<Place>& places, const Place& taken) {
  std::vector<Place> left;
  for (const Place& place : places) {
    if (place.space != taken.space || place.index != taken.index) {
      left.push_back(place);
      continue;
    }
    const std::int64_t end = place.offset + place.bytes, taken_end = taken.offset + taken.bytes;
    auto keep = [&](std::int64_t from, std::int64_t to) {
      if (from < to) left.push_back({place.space, place.index, from, to - from});
    };
    keep(place.offset, std::min(end, taken.offset));
    keep(std::max(place.offset, taken_end), end);
  }
  places = std::move(left);
}

std::vector<Place> freed_by(const ScheduleSet& set, const RunSchedule& schedule, std::size_t index,
                            const std::map<std::int32_t, Use>& last) {
  const Action& action = schedule.actions[index];
  auto freed = [&](const Access& access) {
    if (access.value < 0) return true;  // scratch
    const Use& use = last.at(access.value);
    return use.action == index && use.behind_all && !set.lasting[static_cast<std::size_t>(access.value)];
  };
  std::vector<Place> places, kept;
  for (const Access& access : schedule.operands_of(action)) {
    const Place& place = access.place;
    if (!place.present() || place.bytes == 0 || place.space == Space::store) continue;
    if (!freed(access))
      kept.push_back(place);
    else if (std::find(places.begin(), places.end(), place) == places.end())
      places.push_back(place);
  }
  for (const Place& place : kept) cut_out(places, place);
  return places;
}

}  // namespace

void poison_freed(ScheduleSet& set) {
  for (RunSchedule& schedule : set.runs) {
    const std::map<std::int32_t, Use> last = last_uses(schedule);
    RunSchedule poisoned = schedule.anew();
    for (std::size_t i = 0; i < schedule.actions.size(); ++i) {
      const Action& action = schedule.actions[i];
      poisoned.add(action, schedule.reads(action), schedule.writes(action));
      if (action.kind == ActionKind::fill) continue;
      // The host fills nothing itself; what it enqueues comes behind what it did.
      const Lane lane = action.lane == Lane::host ? Lane::compute : action.lane;
      for (const Place& place : freed_by(set, schedule, i, last)) {
        const Access scratch{.place = place};
        poisoned.add({.kind = ActionKind::fill, .lane = lane, .byte = kPoison, .layer = action.layer}, {},
                     {&scratch, 1});
      }
    }
    schedule = std::move(poisoned);
  }
}

}  // namespace quern
