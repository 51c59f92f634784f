#include "plan/schedule/schedule.h"

#include <algorithm>
#include <iterator>

#include "plan/schedule/byte_ranges.h"

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

namespace {

constexpr struct MicroStepRun {
  Run run;
  MicroStep step;
  std::string_view name;
} kMicroSteps[] = {
    {Run::first, {.last = false}, "first micro-step"},
    {Run::later, {.first = false, .last = false}, "later micro-step"},
    {Run::last, {.first = false}, "last micro-step"},
    {Run::only, {}, "only micro-step"},
    {Run::observed_first, {.last = false, .observed = true}, "first micro-step, observed"},
    {Run::observed_later, {.first = false, .last = false, .observed = true}, "later micro-step, observed"},
    {Run::observed_last, {.first = false, .observed = true}, "last micro-step, observed"},
    {Run::observed_only, {.observed = true}, "only micro-step, observed"},
    {Run::updating_first, {.last = false, .updates = true}, "first micro-step, updating"},
    {Run::updating_only, {.updates = true}, "only micro-step, updating"},
    {Run::observed_updating_first,
     {.last = false, .observed = true, .updates = true},
     "first micro-step, updating, observed"},
    {Run::observed_updating_only, {.observed = true, .updates = true}, "only micro-step, updating, observed"},
};

const MicroStepRun* found(Run run) {
  const auto* it = std::ranges::find(kMicroSteps, run, &MicroStepRun::run);
  return it == std::end(kMicroSteps) ? nullptr : it;
}

}  // namespace

std::optional<MicroStep> micro_step_of(Run run) {
  const MicroStepRun* known = found(run);
  return known ? std::optional(known->step) : std::nullopt;
}

std::string_view name_of(Run run) {
  if (const MicroStepRun* known = found(run)) return known->name;
  switch (run) {
    case Run::load: return "load";
    case Run::refresh: return "refresh";
    case Run::upload: return "upload";
    case Run::evaluate: return "evaluate";
    case Run::logits: return "logits";
    case Run::next_logits: return "next logits";
    case Run::update: return "update";
    case Run::apply: return "apply";
    case Run::result: return "result";
    case Run::observe_weights: return "observe weights";
    default: return "?";
  }
}

Run ScheduleSet::run_of(const MicroStep& micro_step) const {
  auto run = [&](bool last, bool updates) {
    const MicroStep step{micro_step.first, last, micro_step.observed, updates && micro_step.first};
    return std::ranges::find(kMicroSteps, step, &MicroStepRun::step)->run;
  };
  const bool updates = micro_step.updates && !(*this)[run(false, true)].empty();
  return micro_step.last && !(*this)[run(true, updates)].empty() ? run(true, updates) : run(false, updates);
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
      for (std::int32_t input : set.tasks[static_cast<std::size_t>(action.task)].changed)
        write(reads[static_cast<std::size_t>(input)]);
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
