#include "plan/schedule.h"

namespace quern {

std::string_view name_of(Space space) {
  switch (space) {
    case Space::device: return "device";
    case Space::staging: return "staging";
    case Space::results: return "results";
    case Space::store: return "store";
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

std::string_view name_of(Run run) {
  switch (run) {
    case Run::refresh: return "refresh";
    case Run::gather: return "gather";
    case Run::upload: return "upload";
    case Run::evaluate: return "evaluate";
    case Run::logits: return "logits";
    case Run::next_logits: return "next logits";
    case Run::first: return "first micro-step";
    case Run::later: return "later micro-step";
    case Run::last: return "last micro-step";
    case Run::only: return "only micro-step";
    case Run::update: return "update";
    case Run::result: return "result";
    case Run::observed_first: return "first micro-step, observed";
    case Run::observed_later: return "later micro-step, observed";
    case Run::observed_last: return "last micro-step, observed";
    case Run::observed_only: return "only micro-step, observed";
    case Run::observe_weights: return "observe weights";
  }
  return "?";
}

Run ScheduleSet::micro_step(bool first, bool last, bool observed) const {
  const Run ending = first ? (observed ? Run::observed_only : Run::only) : (observed ? Run::observed_last : Run::last);
  if (last && !(*this)[ending].empty()) return ending;
  return first ? (observed ? Run::observed_first : Run::first) : (observed ? Run::observed_later : Run::later);
}

std::int32_t ScheduleSet::original(std::int32_t value) const {
  const auto index = static_cast<std::size_t>(value);
  return value >= 0 && index < copy_of.size() && copy_of[index] >= 0 ? copy_of[index] : value;
}

void number_versions(const ScheduleSet& set, RunSchedule& schedule) {
  std::vector<std::int32_t> written(set.values.size(), 0);
  for (const Action& action : schedule.actions) {
    const auto operands = std::span(schedule.operands).subspan(action.first, action.reads + action.writes);
    const auto reads = operands.first(action.reads), writes = operands.subspan(action.reads);
    for (Access& access : reads)
      if (access.value >= 0) access.version = written[static_cast<std::size_t>(access.value)];
    if (action.task >= 0)
      for (std::int32_t input : set.tasks[static_cast<std::size_t>(action.task)].changed)
        ++written[static_cast<std::size_t>(reads[static_cast<std::size_t>(input)].value)];
    for (Access& access : writes)
      if (access.value >= 0) access.version = ++written[static_cast<std::size_t>(access.value)];
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
