#include "plan/schedule/residency.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "quern/checked.h"
#include "quern/error.h"

namespace quern {

namespace {

using Home = std::tuple<Space, std::int32_t, std::int64_t>;  // of a store, or over ranks
Home home_of(const Place& place) { return {place.space, place.index, place.offset}; }

/// A value of a store, in the slot of a window.
struct Held {
  Access home;              // as it is fetched
  std::int64_t offset = 0;  // in the slot
  bool fetched = false;     // a launch reads it before one has written it
  bool changed = false;
  bool put = false;          // already, from where it was made: it has no slot
  std::int64_t kept = -1;    // not -1: it is not in the slot, but so far behind the ring, for several windows
  std::int32_t version = 0;  // as it is put back
  std::int32_t part = 0;     // version of this rank's part, where it is gathered
  std::int32_t copy = -1;    // the value in the slot
};

/// Consecutive launches, and what they use of stores.
struct Window {
  std::size_t begin = 0, end = 0;  // actions
  std::map<Home, Held> held;
  std::vector<Place> changed;  // what may not be fetched or gathered before this window is done
  std::int64_t offset = 0;     // of its slot, in the ring
  std::int64_t bytes = 0;
  bool changes() const {
    return std::any_of(held.begin(), held.end(), [](const auto& known) { return known.second.changed; });
  }
};

/// What ranks have parts of, by the value of this rank's part; and how often a run has written that so far.
class Parts {
 public:
  explicit Parts(const ScheduleSet& set) {
    for (const auto& [offset, over] : set.over_ranks)
      if (over.part.place.present()) wholes_[over.part.value].push_back(offset);
  }
  void write(const Access& access, Window& window) {
    const auto known = wholes_.find(access.value);
    if (known == wholes_.end()) return;
    std::int32_t& version = versions_[access.value];
    version = std::max(version, access.version);
    for (const std::int64_t offset : known->second) window.changed.push_back({Space::ranks, 0, offset, 1});
  }
  std::int32_t version(const Access& part) const {
    const auto known = versions_.find(part.value);
    return known == versions_.end() ? 0 : known->second;
  }

 private:
  std::map<std::int32_t, std::vector<std::int64_t>> wholes_;
  std::map<std::int32_t, std::int32_t> versions_;
};

/// What a slot takes for a value.
struct SlotSize {
  const ScheduleSet& set;
  std::int64_t alignment = 1;
  const SpareBytes& spare;
  std::int64_t of(const Place& place) const {
    if (place.space == Space::ranks) {
      const OverRanks& over = set.over_ranks.at(place.offset);
      return rounded_up(place.bytes, alignment) + (adds_in_slot(over) ? rounded_up(over.largest, alignment) : 0);
    }
    const auto found = spare.find({place.index, place.offset + place.bytes});
    return rounded_up(place.bytes + (found != spare.end() ? found->second : 0), alignment);
  }
  /// The part, behind the whole: it is in a store, and sums are added to it.
  static bool adds_in_slot(const OverRanks& over) { return over.add >= 0 && over.part.place.space == Space::store; }
};

/// `version` is the value's after this use.
void use(Window& window, const Access& access, bool reads, bool writes, std::int32_t version, const SlotSize& size) {
  auto [it, fresh] = window.held.try_emplace(home_of(access.place));
  Held& held = it->second;
  if (fresh) {
    held.home = access;
    held.home.version = version - (writes ? 1 : 0);
    held.fetched = reads;
    held.offset = window.bytes;
    window.bytes += size.of(access.place);
  }
  auto covers = [&](auto beside) { return overlap(beside->second.home.place, access.place); };
  if (held.home.place != access.place || (it != window.held.begin() && covers(std::prev(it))) ||
      (std::next(it) != window.held.end() && covers(std::next(it))))
    fail_internal("residency", "two values share bytes of a store");
  held.changed = held.changed || writes;
  held.version = version;
}

/// Values that no window writes and more than one reads; those first whose last reader comes first, as they are read
/// again soonest.
std::vector<std::pair<Home, std::int64_t>> reused(const std::vector<Window>& windows, const SlotSize& size) {
  std::map<Home, int> readers;
  std::map<Home, std::pair<std::int32_t, std::int32_t>> versions;
  std::set<Home> changed;
  for (const Window& window : windows)
    for (const auto& [home, held] : window.held) {
      ++readers[home];
      const std::pair version{held.home.version, held.part};
      if (held.changed || !held.fetched || versions.try_emplace(home, version).first->second != version)
        changed.insert(home);
    }
  std::vector<std::pair<Home, std::int64_t>> result;
  std::set<Home> seen;
  for (auto window = windows.rbegin(); window != windows.rend(); ++window)
    for (const auto& [home, held] : window->held)
      if (readers[home] > 1 && !changed.contains(home) && seen.insert(home).second)
        result.emplace_back(home, size.of(held.home.place));
  std::reverse(result.begin(), result.end());
  return result;
}

/// Values for which there is room behind the ring leave the windows' slots.
void keep(std::vector<Window>& windows, std::int64_t room, const SlotSize& size) {
  std::map<Home, std::int64_t> kept;
  std::int64_t end = 0;
  for (const auto& [home, bytes] : reused(windows, size))
    if (end + bytes <= room) kept[home] = std::exchange(end, end + bytes);
  for (Window& window : windows) {
    window.bytes = 0;
    for (auto& [home, held] : window.held) {
      if (held.put) continue;
      if (const auto found = kept.find(home); found != kept.end())
        held.kept = found->second;
      else
        held.offset = std::exchange(window.bytes, window.bytes + size.of(held.home.place));
    }
  }
}

/// Gives every window a slot behind the slot of the one before it.
void lay_out(std::vector<Window>& windows, const SlotRing& ring) {
  std::int64_t end = 0;
  for (Window& window : windows) {
    window.offset = end + window.bytes > ring.bytes ? 0 : end;
    end = window.offset + window.bytes;
  }
}

std::vector<Window> windows_of(const ScheduleSet& set, const RunSchedule& schedule, const SlotSize& size) {
  std::vector<Window> windows;
  Parts parts(set);
  for (std::size_t i = 0; i < schedule.actions.size();) {
    const std::int32_t number = schedule.actions[i].window;
    Window window;
    window.begin = i;
    for (; i < schedule.actions.size() && schedule.actions[i].window == number; ++i) {
      const Action& action = schedule.actions[i];
      if (action.kind == ActionKind::put && set.has_slot(schedule.writes(action)[0].place)) {
        const Access& home = schedule.writes(action)[0];
        window.held[home_of(home.place)] = {.home = home, .changed = true, .put = true};
      }
      if (action.kind != ActionKind::launch && action.kind != ActionKind::collective) continue;
      const Task& task = set.task_of(action);
      auto listed = [](const std::vector<std::int32_t>& list, std::size_t at) {
        return std::find(list.begin(), list.end(), static_cast<std::int32_t>(at)) != list.end();
      };
      const auto reads = schedule.reads(action), writes = schedule.writes(action);
      for (std::size_t r = 0; r < reads.size(); ++r) {
        if (!set.has_slot(reads[r].place)) continue;
        const bool changed = listed(task.changed, r);
        use(window, reads[r], true, changed, reads[r].version + (changed ? 1 : 0), size);
        if (reads[r].place.space == Space::ranks)
          window.held.at(home_of(reads[r].place)).part = parts.version(set.over_ranks.at(reads[r].place.offset).part);
      }
      for (std::size_t w = 0; w < writes.size(); ++w) {
        parts.write(writes[w], window);
        if (set.has_slot(writes[w].place))
          use(window, writes[w], listed(task.summed, w), true, writes[w].version, size);
      }
    }
    window.end = i;
    for (const auto& [home, held] : window.held) {
      if (!held.changed) continue;
      window.changed.push_back(held.home.place);
      if (held.home.place.space == Space::ranks)
        window.changed.push_back(set.over_ranks.at(held.home.place.offset).part.place);
    }
    if (!window.held.empty() && number < 0) fail_internal("residency", schedule.name + " uses a store in no window");
    if (!window.held.empty() || !window.changed.empty()) windows.push_back(std::move(window));
  }
  return windows;
}

/// Writes one schedule anew, with its transfers.
class Acquirer {
 public:
  Acquirer(ScheduleSet& set, const RunSchedule& from, std::vector<Window> windows, const SlotRing& ring,
           std::int64_t alignment)
      : set_(set), from_(from), windows_(std::move(windows)), ring_(ring), alignment_(alignment), to_(from.anew()) {}

  RunSchedule run() {
    std::size_t next = 0;
    acquire_until(next);
    for (std::size_t i = 0; i < from_.actions.size();) {
      if (next == windows_.size() || i < windows_[next].begin) {
        copy_action(from_.actions[i++], nullptr);
        continue;
      }
      acquire_until(next);
      const Window& window = windows_[next];
      for (; i < window.end; ++i) copy_action(from_.actions[i], &window);
      release(next++);
    }
    return std::move(to_);
  }

 private:
  Place slot_of(const Window& window, const Held& held) const {
    const std::int64_t offset = held.kept < 0 ? window.offset + held.offset : ring_.bytes + held.kept;
    return {Space::device, 0, ring_.offset + offset, held.home.place.bytes};
  }

  /// Whether the window may be fetched while all from `now` on, up to it, have not run: it is disjoint from them, and
  /// what it reads is not what they will change.
  bool may_come(std::size_t number, std::size_t now) const {
    const Window& wanted = windows_[number];
    for (std::size_t earlier = now; earlier < number; ++earlier) {
      const Window& window = windows_[earlier];
      if (window.bytes > 0 && wanted.offset < window.offset + window.bytes &&
          window.offset < wanted.offset + wanted.bytes)
        return false;
      for (const Place& changed : window.changed)
        for (const auto& [home, held] : wanted.held)
          if (held.fetched && overlap(changed, held.home.place)) return false;
    }
    return true;
  }

  // Enqueues the fetches that are due when window `now` is about to run.
  void acquire_until(std::size_t now) {
    while (acquired_ < windows_.size() && may_come(acquired_, now)) acquire(acquired_++);
  }

  void acquire(std::size_t number) {
    Window& window = windows_[number];
    const Action& first = from_.actions[window.begin];
    for (auto& [home, held] : window.held) {
      if (held.put) continue;
      if (const auto there = kept_.find(home); there != kept_.end()) {
        held.copy = there->second;
        continue;
      }
      held.copy = copy_of(held.home);
      if (held.kept >= 0) kept_[home] = held.copy;
      if (!held.fetched) continue;
      const Access here{slot_of(window, held), held.copy, held.home.version};
      if (held.home.place.space == Space::ranks)
        gather(here, set_.over_ranks.at(held.home.place.offset), held.part, first);
      else
        get(held.home, here, first);
    }
  }

  void release(std::size_t number) {
    const Window& window = windows_[number];
    const Action& first = from_.actions[window.begin];
    for (const auto& [home, held] : window.held) {
      if (!held.changed || held.put) continue;
      const Access here{slot_of(window, held), held.copy, held.version};
      if (held.home.place.space == Space::ranks)
        reduce(here, held.home, first);
      else
        put(here, {held.home.place, held.home.value, held.version}, first);
    }
  }

  std::int32_t copy_of(const Access& home) {
    set_.values.push_back(set_.values[static_cast<std::size_t>(home.value)] + " in a slot");
    set_.lasting.push_back(false);
    set_.copy_of.resize(set_.values.size());
    set_.copy_of.back() = home;
    return static_cast<std::int32_t>(set_.values.size() - 1);
  }

  void add(const Action& first, ActionKind kind, std::int32_t task, std::span<const Access> reads,
           std::span<const Access> writes, Lane lane = Lane::communication) {
    to_.add({.kind = kind, .lane = lane, .task = task, .layer = first.layer, .window = first.window}, reads, writes);
  }
  void get(const Access& home, const Access& here, const Action& first) {
    add(first, ActionKind::get, -1, {&home, 1}, {&here, 1}, Lane::copy_in);
  }
  void put(const Access& here, const Access& home, const Action& first) {
    add(first, ActionKind::put, -1, {&here, 1}, {&home, 1}, Lane::copy_out);
  }

  void gather(const Access& whole, const OverRanks& over, std::int32_t version, const Action& first) {
    if (!over.part.place.present()) fail_internal("residency", "what nobody made is read");
    Access part = over.part;
    part.version = version;
    if (part.place.space == Space::store) {  // other ranks reach slots alone
      const Access home = part;
      part = {{Space::device, 0, whole.place.offset + over.first, part.place.bytes}, whole.value, whole.version};
      get(home, part, first);
    }
    add(first, ActionKind::collective, over.gather, {&part, 1}, {&whole, 1});
  }

  /// The sum over all ranks, of which each gets its part: written there by the first of a run that starts it, else
  /// made in the slot and added. What other ranks write is in the arena, so a part of a store comes to the slot too.
  void reduce(const Access& whole, const Access& home, const Action& first) {
    const OverRanks& over = set_.over_ranks.at(home.place.offset);
    if (!over.part.place.present()) return;
    Access before = over.part;
    before.version = reduced_[home.place.offset]++;
    Access after = before;
    ++after.version;
    const bool stored = over.part.place.space == Space::store, starts = from_.starts_sums && before.version == 0;
    if (starts && !stored) return add(first, ActionKind::collective, over.reduce, {&whole, 1}, {&after, 1});
    const Access sum{
        {Space::device, 0, whole.place.offset + over.first, over.part.place.bytes}, whole.value, whole.version + 1};
    add(first, ActionKind::collective, over.reduce, {&whole, 1}, {&sum, 1});
    if (starts) return put(sum, after, first);
    Access here_before = before, here_after = after;
    if (stored) {
      here_before.place.space = Space::device;
      here_before.place.index = 0;
      here_before.place.offset = whole.place.offset + rounded_up(whole.place.bytes, alignment_);
      here_before.value = copy_of(before);
      here_after = {here_before.place, here_before.value, after.version};
      get(before, here_before, first);
    }
    const Access reads[] = {sum, here_before}, writes[] = {here_after, {}};  // no workspace
    add(first, ActionKind::launch, over.add, reads, writes);
    if (stored) put(here_after, after, first);
  }

  void copy_action(const Action& action, const Window* window) {
    auto moved = [&](std::span<const Access> accesses) {
      std::vector<Access> result(accesses.begin(), accesses.end());
      for (Access& access : result) {
        if (!window || !set_.has_slot(access.place)) continue;
        const Held& held = window->held.at(home_of(access.place));
        if (!held.put) access = {slot_of(*window, held), held.copy, access.version};
      }
      return result;
    };
    to_.add(action, moved(from_.reads(action)), moved(from_.writes(action)));
  }

  ScheduleSet& set_;
  const RunSchedule& from_;
  std::vector<Window> windows_;
  const SlotRing& ring_;
  std::int64_t alignment_;
  RunSchedule to_;
  std::map<std::int64_t, std::int32_t> reduced_;  // by where the whole begins: sums over ranks so far
  std::map<Home, std::int32_t> kept_;             // the copies that stay for later windows
  std::size_t acquired_ = 0;                      // windows whose fetches are enqueued
};

}  // namespace

SlotRing ring_for(const ScheduleSet& set, std::int64_t alignment, int ahead, SpareBytes spare) {
  SlotRing ring{.spare = std::move(spare)};
  for (const RunSchedule& schedule : set.runs) {
    std::vector<Window> windows = windows_of(set, schedule, {set, alignment, ring.spare});
    std::erase_if(windows, [](const Window& window) { return window.bytes == 0; });
    const bool puts =
        std::any_of(windows.begin(), windows.end(), [](const Window& window) { return window.changes(); });
    const auto together = static_cast<std::size_t>(ahead + (puts ? 2 : 1));
    std::int64_t bytes = 0;  // of so many windows in a row
    for (std::size_t i = 0; i < windows.size(); ++i) {
      bytes += windows[i].bytes - (i < together ? 0 : windows[i - together].bytes);
      ring.bytes = std::max(ring.bytes, bytes);
    }
  }
  return ring;
}

std::int64_t reused_bytes(const ScheduleSet& set, std::int64_t alignment, const SpareBytes& spare) {
  const SlotSize size{set, alignment, spare};
  std::int64_t most = 0;
  for (const RunSchedule& schedule : set.runs) {
    std::int64_t bytes = 0;
    for (const auto& [home, own] : reused(windows_of(set, schedule, size), size)) bytes += own;
    most = std::max(most, bytes);
  }
  return most;
}

void make_resident(ScheduleSet& set, const SlotRing& ring, std::int64_t alignment) {
  const SlotSize size{set, alignment, ring.spare};
  for (RunSchedule& schedule : set.runs) {
    std::vector<Window> windows = windows_of(set, schedule, size);
    if (ring.kept > 0) keep(windows, ring.kept, size);
    lay_out(windows, ring);
    if (!windows.empty()) schedule = Acquirer(set, schedule, std::move(windows), ring, alignment).run();
  }
}

}  // namespace quern
