#include "plan/schedule.h"

#include <algorithm>

#include "plan/byte_ranges.h"

namespace quern {

std::string_view name_of(Space space) {
  switch (space) {
    case Space::device: return "device";
    case Space::staging: return "staging";
    case Space::results: return "results";
    case Space::store: return "store";
    case Space::ranks: return "ranks";
  }
  return "?";
}

std::string_view name_of(Lane lane) {
  switch (lane) {
    case Lane::compute: return "compute";
    case Lane::copy_in: return "copy in";
    case Lane::copy_out: return "copy out";
    case Lane::communication: return "communication";
    case Lane::host: return "host";
  }
  return "?";
}

std::string_view name_of(Axis axis) { return axis == Axis::ranks ? "ranks" : "machine"; }

std::string_view name_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::launch: return "launch";
    case ActionKind::copy: return "copy";
    case ActionKind::fill: return "fill";
    case ActionKind::collective: return "collective";
    case ActionKind::put: return "put";
    case ActionKind::get: return "get";
    case ActionKind::record: return "record";
    case ActionKind::wait: return "wait";
    case ActionKind::host: return "host";
  }
  return "?";
}

std::string name_of(const Run& run) {
  switch (run.kind) {
    case Run::Kind::load: return "load";
    case Run::Kind::refresh: return "refresh";
    case Run::Kind::upload: return "upload";
    case Run::Kind::evaluate: return "evaluate";
    case Run::Kind::logits: return "logits";
    case Run::Kind::next_logits: return "next logits";
    case Run::Kind::update: return "update";
    case Run::Kind::apply: return "apply";
    case Run::Kind::result: return "result";
    case Run::Kind::exchange: return "exchange";
    case Run::Kind::observe_weights: return "observe weights";
    case Run::Kind::micro_step: break;
  }
  const MicroStep& step = run.step;
  return std::string(step.first ? (step.last ? "only" : "first") : (step.last ? "last" : "later")) + " micro-step" +
         (step.updates ? ", updating" : "") + (step.observed ? ", observed" : "");
}

std::vector<Run> all_runs() {
  std::vector<Run> runs{Run::refresh, Run::upload, Run::evaluate, Run::logits, Run::next_logits};
  for (const bool updates : {false, true})
    for (const bool observed : {false, true})
      for (const Run& run : {Run::first, Run::later, Run::last, Run::only})
        if (run.step.first || !updates) runs.push_back({.step = {run.step.first, run.step.last, observed, updates}});
  runs.insert(runs.end(), {Run::update, Run::apply, Run::result, Run::exchange, Run::observe_weights, Run::load});
  return runs;
}

Run ScheduleSet::run_of(MicroStep step) const {
  auto has = [&](bool last) { return !(*this)[{.step = {step.first, last, step.observed, step.updates}}].empty(); };
  step.updates = step.updates && step.first && has(false);
  step.last = step.last && has(true);
  return {.step = step};
}

const RunSchedule& ScheduleSet::operator[](const Run& run) const {
  static const RunSchedule none;
  const auto found = std::ranges::find(runs, run, &RunSchedule::run);
  return found == runs.end() ? none : *found;
}

RunSchedule& ScheduleSet::operator[](const Run& run) {
  const auto found = std::ranges::find(runs, run, &RunSchedule::run);
  return found == runs.end() ? runs.emplace_back(RunSchedule{.run = run, .name = name_of(run)}) : *found;
}

bool ScheduleSet::has_slot(const Place& place) const {
  if (!place.present() || (place.space != Space::store && place.space != Space::ranks)) return false;
  if (place.space == Space::ranks) return true;
  const auto store = static_cast<std::size_t>(place.index);
  return store >= in_place.size() || !in_place[store];
}

Access ScheduleSet::at_home(const Access& access) const {
  const auto index = static_cast<std::size_t>(access.value);
  const bool copy = access.value >= 0 && index < copy_of.size() && copy_of[index].place.present();
  return copy ? copy_of[index] : access;
}

void number_versions(const ScheduleSet& set, RunSchedule& schedule) {
  std::vector<ByteRanges<std::int32_t>> written(set.values.size());  // by value: ranges of a tensor are written apart
  auto writes_of = [&](const Access& access) {
    std::int32_t writes = 0;
    written[static_cast<std::size_t>(access.value)].visit(
        access.place.offset, access.place.offset + access.place.bytes,
        [&](std::int32_t known) { writes = std::max(writes, known); });
    return writes;
  };
  auto write = [&](const Access& access) {
    const std::int32_t version = writes_of(access) + 1;
    written[static_cast<std::size_t>(access.value)].set(access.place.offset, access.place.offset + access.place.bytes,
                                                        version);
    return version;
  };
  for (const Action& action : schedule.actions) {
    const auto operands = std::span(schedule.operands).subspan(action.first, action.reads + action.writes);
    const auto reads = operands.first(action.reads), writes = operands.subspan(action.reads);
    for (Access& access : reads)
      if (access.value >= 0) access.version = writes_of(access);
    if (action.task >= 0)
      for (std::int32_t input : set.task_of(action).changed) write(reads[static_cast<std::size_t>(input)]);
    for (Access& access : writes)
      if (access.value >= 0) access.version = write(access);
  }
}

void RunSchedule::add(Action action, std::span<const Access> reads, std::span<const Access> writes) {
  action.first = static_cast<std::uint32_t>(operands.size());
  action.reads = static_cast<std::uint32_t>(reads.size());
  action.writes = static_cast<std::uint32_t>(writes.size());
  operands.insert(operands.end(), reads.begin(), reads.end());
  operands.insert(operands.end(), writes.begin(), writes.end());
  actions.push_back(action);
}

}  // namespace quern
