#include "plan/laws/check_schedules.h"

#include <algorithm>
#include <utility>

namespace quern {

namespace {

constexpr std::size_t kMostFaults = 32;

}  // namespace

void ScheduleChecker::fault(const std::string& what) {
  if (faults_.size() < kMostFaults) faults_.push_back(where_ + ": " + what);
}

std::string ScheduleChecker::name(std::int32_t value) const {
  return value < 0 ? "scratch" : "`" + set_.values[static_cast<std::size_t>(value)] + "`";
}

std::int64_t ScheduleChecker::begin_of(const Place& place) const {
  return place.offset + (place.space == Space::staging ? staging_ : 0);
}

void ScheduleChecker::read(const Access& access) {
  const Place& place = access.place;
  if (!place.present() || place.bytes == 0) return;
  Shadow& shadow = shadow_of(place);
  const std::int64_t begin = begin_of(place), end = begin + place.bytes;
  std::int64_t covered = begin;
  for (auto it = shadow.cut(begin, end); it != shadow.end() && it->first < end; ++it) {
    Bytes& bytes = it->second.known;
    if (it->first > covered) break;
    covered = it->second.end;
    if (bytes.value != access.value)
      return fault("reads " + name(access.value) + " where " + name(bytes.value) + " is");
    if (bytes.epoch != epoch_ && !set_.lasting[static_cast<std::size_t>(access.value)])
      return fault("reads " + name(access.value) + " of an earlier run");
    if (const std::int32_t version = bytes.epoch == epoch_ ? bytes.version : 0; version != access.version)
      return fault("reads " + name(access.value) + " after " + std::to_string(version) +
                   " writes in this run, expected " + std::to_string(access.version));
    if (!known(bytes.lane, bytes.when))
      return fault("reads " + name(access.value) + ", which " + std::string(name_of(static_cast<Lane>(bytes.lane))) +
                   " may still be writing");
    bytes.reads[static_cast<std::size_t>(lane_)] = now_[static_cast<std::size_t>(lane_)];
  }
  if (covered < end) fault("reads " + name(access.value) + ", which nobody wrote");
  check_gathered(access);
}

/// Gathered weights are of the newest version of this rank's part.
void ScheduleChecker::check_gathered(const Access& access) {
  const auto gathered = gathered_.find(access.value);
  if (gathered == gathered_.end()) return;
  const Access& part = set_.over_ranks.at(set_.at_home(access).place.offset).part;
  if (const auto writes = part_writes_.find(part.value);
      writes != part_writes_.end() && writes->second != gathered->second)
    fault("reads " + name(access.value) + ", gathered before " + name(part.value) + " was changed");
}

void ScheduleChecker::write(const Access& access) {
  const Place& place = access.place;
  if (!place.present() || place.bytes == 0) return;
  Shadow& shadow = shadow_of(place);
  const std::int64_t begin = begin_of(place), end = begin + place.bytes;
  shadow.visit(begin, end, [&](const Bytes& bytes) {
    if (!known(bytes.lane, bytes.when))
      fault("writes " + name(access.value) + " where " + std::string(name_of(static_cast<Lane>(bytes.lane))) +
            " may still be writing " + name(bytes.value));
    for (int lane = 0; lane < kLanes; ++lane)
      if (!known(lane, bytes.reads[static_cast<std::size_t>(lane)]))
        fault("writes " + name(access.value) + " where " + std::string(name_of(static_cast<Lane>(lane))) +
              " may still be reading " + name(bytes.value));
    if (bytes.value >= 0 && bytes.value != access.value && set_.lasting[static_cast<std::size_t>(bytes.value)])
      fault("writes " + name(access.value) + " over " + name(bytes.value) + ", which outlives its run");
  });
  shadow.set(begin, end, {access.value, access.version, epoch_, lane_, now_[static_cast<std::size_t>(lane_)], {}});
}

/// `moves`: a put or get, which changes no value.
void ScheduleChecker::count_write(const Access& access, bool moves) {
  if (!access.place.present() || access.value < 0) return;
  const Access home = set_.at_home(access);
  const std::int64_t begin = home.place.offset, end = begin + home.place.bytes;
  ByteRanges<Written>& ranges = written_[home.value];
  std::int32_t newest = 0, at_home = access.version;
  ranges.visit(begin, end, [&](const Written& written) {
    newest = std::max(newest, written.newest);
    at_home = std::min(at_home, written.at_home);
  });
  if (newest == 0) at_home = 0;
  if (const std::int32_t expected = newest + (moves ? 0 : 1); access.version != expected)
    fault(std::string(moves ? "moves" : "makes") + " version " + std::to_string(access.version) + " of " +
          name(access.value) + ", expected " + std::to_string(expected));
  if (!moves) ++part_writes_[home.value];
  const bool stays = access.value == home.value || is_made_anew(home.place);
  ranges.set(begin, end, {access.version, stays ? access.version : at_home});
}

bool ScheduleChecker::is_made_anew(const Place& home) const {
  return home.space == Space::ranks && !set_.over_ranks.at(home.offset).part.place.present();
}

void ScheduleChecker::check_kept(const RunSchedule& schedule) {
  where_ = schedule.name;
  for (auto& [value, ranges] : written_)
    for (const auto& [begin, range] : ranges)
      if (range.known.at_home != range.known.newest)
        fault("changes " + name(value) + " in a slot and does not put it back");
}

/// The host reads behind the compute lane alone.
void ScheduleChecker::check_end() {
  constexpr auto kLane = static_cast<std::size_t>(Lane::communication);
  if (clocks_.at(Lane::compute)[kLane] < clocks_.at(Lane::communication)[kLane])
    fault("ends while communication may still be at work");
}

// Within one launch an output may be placed on an input only when it is that value, or when the op says that it may
// take over its memory; outputs and workspace share nothing.
void ScheduleChecker::check_operands(const RunSchedule& schedule, std::size_t index) {
  const Action& action = schedule.actions[index];
  struct Range {
    const Access* access;
    int operand;  // inputs, then outputs
  };
  std::vector<Range> ranges;
  const auto operands = schedule.operands_of(action);
  for (std::size_t i = 0; i < operands.size(); ++i)
    if (operands[i].place.present() && operands[i].place.bytes > 0)
      ranges.push_back({&operands[i], static_cast<int>(i)});
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    const Place &x = a.access->place, &y = b.access->place;
    return std::tuple(x.space, x.index, x.offset) < std::tuple(y.space, y.index, y.offset);
  });
  const int reads = static_cast<int>(action.reads);
  for (std::size_t i = 0; i < ranges.size(); ++i)
    for (std::size_t j = i + 1; j < ranges.size() && overlap(ranges[i].access->place, ranges[j].access->place); ++j) {
      Range a = ranges[i], b = ranges[j];
      if (a.operand > b.operand) std::swap(a, b);
      if (b.operand < reads) continue;
      const bool same_place = a.access->place == b.access->place || action.kind == ActionKind::collective;
      if (a.operand < reads && same_place && a.access->value == b.access->value) continue;
      const std::vector<std::pair<int, int>>* allowed = action.task < 0 ? nullptr : &set_.task_of(action).overwrites;
      if (a.operand < reads && allowed && a.access->place.offset == b.access->place.offset &&
          std::find(allowed->begin(), allowed->end(), std::pair(b.operand - reads, a.operand)) != allowed->end())
        continue;
      fault("writes " + name(b.access->value) + " over its operand " + name(a.access->value));
    }
}

void ScheduleChecker::act(const RunSchedule& schedule, std::size_t index) {
  const Action& action = schedule.actions[index];
  const Task* task = action.task < 0 ? nullptr : &set_.task_of(action);
  where_ = schedule.name + ", action " + std::to_string(index) + " (" +
           (task ? task->name : std::string(name_of(action.kind))) +
           (action.layer < 0 ? "" : ", layer " + std::to_string(action.layer)) + ")";
  lane_ = static_cast<int>(action.lane);
  if (!clocks_.enqueue(action)) return fault("waits for an event that nobody recorded");
  if (action.kind == ActionKind::wait || action.kind == ActionKind::record) return;
  now_ = clocks_.at(action.lane);
  check_operands(schedule, index);
  if (task && task->exclusive) use_alone(action.task);
  const auto reads = schedule.reads(action), writes = schedule.writes(action);
  for (const Access& access : reads) read(access);
  if (task)
    for (std::int32_t output : task->summed) {
      Access before = writes[static_cast<std::size_t>(output)];
      --before.version;
      read(before);
    }
  auto make = [&](const Access& access) {
    const bool transfers = (action.kind == ActionKind::put || action.kind == ActionKind::get) &&
                           set_.at_home(access).value == set_.at_home(reads[0]).value;
    const bool gathered = gathers(action, access, reads[0]);
    if (gathered)
      gathered_[access.value] = part_writes_[set_.over_ranks.at(set_.at_home(access).place.offset).part.value];
    count_write(access, transfers || gathered);
    write(access);
  };
  if (task)
    for (std::int32_t input : task->changed) {
      Access after = reads[static_cast<std::size_t>(input)];
      ++after.version;
      make(after);
    }
  for (const Access& access : writes) make(access);
  const bool scatters = action.kind == ActionKind::collective;  // else a sum in the slot is read, one version on
  for (const Access& whole : reads) count_sum(whole, scatters ? whole.version : whole.version - 1, writes);
}

bool ScheduleChecker::reduces(const Action& action) const {
  return set_.task_of(action).instance.kind == "reduce_scatter";
}

/// Brings together, in a slot, what ranks have parts of; or this rank's part to there.
bool ScheduleChecker::gathers(const Action& action, const Access& access, const Access& part) {
  const Place home = set_.at_home(access).place;
  const bool brings = action.kind == ActionKind::get || (action.kind == ActionKind::collective && !reduces(action));
  if (!brings || home.space != Space::ranks) return false;
  if (set_.over_ranks.at(home.offset).part.value != part.value && access.value != part.value)
    fault("makes " + name(access.value) + " of " + name(part.value) + ", which is no part of it");
  return true;
}

/// A version of a value that ranks have parts of is not lost once this rank's part is of it.
void ScheduleChecker::count_sum(const Access& whole, std::int32_t version, std::span<const Access> writes) {
  if (!whole.place.present() || whole.value < 0) return;
  const Access home = set_.at_home(whole);
  if (home.place.space != Space::ranks) return;
  const Access& part = set_.over_ranks.at(home.place.offset).part;
  for (const Access& written : writes) {
    if (!part.place.present() || written.value < 0 || set_.at_home(written).value != part.value) continue;
    if (written.place.bytes != part.place.bytes)
      fault("reduces " + name(whole.value) + " to other bytes than its part has");
    const std::int64_t begin = home.place.offset, end = begin + home.place.bytes;
    written_[home.value].set(begin, end, {version, version});
  }
}

// A kernel with scratch of its own: its launches are ordered as writers of one place are.
void ScheduleChecker::use_alone(std::int32_t task) {
  Seen& last = last_launch_[task];
  if (!known(last.lane, last.when))
    fault("runs a kernel that keeps scratch while " + std::string(name_of(static_cast<Lane>(last.lane))) +
          " may still be running it");
  last = {lane_, now_[static_cast<std::size_t>(lane_)]};
}

void ScheduleChecker::hold(const Access& access) {
  where_ = "start";
  now_ = clocks_.at(Lane::host);
  lane_ = static_cast<int>(Lane::host);
  write(access);
}

void ScheduleChecker::run(const RunSchedule& schedule, std::int64_t slot, std::int64_t slot_bytes) {
  ++epoch_;
  staging_ = slot * slot_bytes;
  clocks_.begin_run(schedule.events);
  written_.clear();
  part_writes_.clear();
  gathered_.clear();
  for (std::size_t i = 0; i < schedule.actions.size(); ++i) act(schedule, i);
  check_kept(schedule);
  check_end();
}

namespace {

/// Runs of a plan in the orders that the engine and the trainer give them.
class Walk {
 public:
  explicit Walk(const Plan& plan) : plan_(plan), checker_(plan.schedules) {}

  std::vector<std::string> run() {
    if (std::vector<std::string> faults = outside(); !faults.empty()) return faults;
    for (const Access& access : plan_.schedules.held) checker_.hold(access);
    one(Run::load);
    one(Run::refresh);
    evaluations();
    // Steps of one and of several micro-batches, observed or not, after each other and after evaluations.
    const int several = std::min(plan_.options.uploads - 1, 3);
    std::vector<int> steps{1, several};  // 0: evaluations
    if (!plan_.schedules[Run::apply].empty()) steps = {1, 1, several, 0, several};
    for (bool observed : {false, true, true, false}) {
      for (int micro_batches : steps) micro_batches > 0 ? step(micro_batches, observed) : evaluations();
      evaluations();
    }
    for (int micro_batches : {1, several}) {
      apply();
      one(Run::refresh);
      step(micro_batches, false);
    }
    return checker_.faults();
  }

 private:
  std::int64_t bytes_of(const Place& memory) const {
    switch (memory.space) {
      case Space::device: return plan_.device_bytes;
      case Space::staging: return plan_.staging_slot_bytes;
      case Space::results: return plan_.pinned_bytes - plan_.staging_slot_bytes * plan_.options.uploads;
      case Space::store: return plan_.stores[static_cast<std::size_t>(memory.index)].bytes;
      case Space::ranks: return 0;  // nothing is there
    }
    return 0;
  }
  // Places that are not whole in their memory.
  std::vector<std::string> outside() const {
    std::vector<std::string> faults;
    for (const RunSchedule& schedule : plan_.schedules.runs)
      for (const Access& access : schedule.operands) {
        const Place& place = access.place;
        if (!place.present() || place.offset + place.bytes <= bytes_of(place) || faults.size() == kMostFaults) continue;
        faults.push_back(schedule.name + ": a place of " + std::to_string(place.bytes) + " bytes at " +
                         std::to_string(place.offset) + " is outside of its memory (" +
                         std::string(name_of(place.space)) + ", " + std::to_string(bytes_of(place)) + " bytes)");
      }
    return faults;
  }
  void one(Run run) {
    if (run == Run::upload) slot_ = (slot_ + 1) % plan_.options.uploads;
    checker_.run(plan_.schedules[run], slot_, plan_.staging_slot_bytes);
  }
  void apply() {
    if (std::exchange(deferred_, false)) one(Run::apply);
  }
  void evaluations() {
    apply();
    exchange();
    for (Run run : {Run::evaluate, Run::logits, Run::next_logits}) {
      if (plan_.schedules[run].empty()) continue;
      one(Run::upload);
      one(run);
      checker_.synchronize();  // the host reads what they leave
    }
    exchange();
  }
  void exchange() {
    if (plan_.schedules[Run::exchange].empty()) return;
    one(Run::exchange);
    one(Run::refresh);
  }
  void step(int micro_batches, bool observed) {
    if (!plan_.options.train || (observed && !plan_.options.observe)) return;
    for (int i = 0; i < micro_batches; ++i) {
      one(Run::upload);
      const bool first = i == 0;
      one(plan_.schedules.run_of({.first = first,
                                  .last = i + 1 == micro_batches,
                                  .observed = observed,
                                  .updates = first && std::exchange(deferred_, false)}));
    }
    if (observed) one(Run::observe_weights);
    one(Run::update);
    deferred_ = true;
    one(Run::result);
  }

  const Plan& plan_;
  ScheduleChecker checker_;
  int slot_ = 0;
  bool deferred_ = false;  // what the last update left
};

}  // namespace

std::vector<std::string> schedule_faults(const Plan& plan) { return Walk(plan).run(); }

}  // namespace quern
