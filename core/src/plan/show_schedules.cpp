#include "plan/show_schedules.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "plan/time/simulate.h"
#include "plan/time/step_time.h"
#include "quern/error.h"

namespace quern {

namespace {

std::string value_list(const ScheduleSet& set, std::span<const Access> accesses) {
  constexpr std::size_t kMost = 6;
  std::string text;
  std::size_t shown = 0, present = 0;
  for (const Access& access : accesses) {
    if (!access.place.present()) continue;
    if (++present > kMost) continue;
    text += (shown++ ? ", " : "") +
            (access.value < 0 ? std::string("scratch") : set.values[static_cast<std::size_t>(access.value)]);
  }
  return present > kMost ? text + fmt::format(", ... ({} in all)", present) : text;
}

std::int64_t bytes_of(const RunSchedule& schedule, const Action& action) {
  std::int64_t bytes = 0;
  for (const Access& access : schedule.operands_of(action)) bytes += access.place.present() ? access.place.bytes : 0;
  return bytes;
}

/// "fetch" and "release" for a store's transfers, "gather" and "reduce" for collectives.
std::string_view verb_of(const ScheduleSet& set, const Action& action) {
  if (action.kind == ActionKind::get) return "fetch";
  if (action.kind == ActionKind::put) return "release";
  if (action.kind != ActionKind::collective) return name_of(action.kind);
  const std::string& kind = set.task_of(action).instance.kind;
  return kind == "all_gather" ? "gather" : kind == "all_to_all" ? "exchange" : "reduce";
}

std::string title_of(const ScheduleSet& set, const Action& action) {
  std::string text = action.task >= 0 ? set.task_of(action).name : "";
  if (action.event >= 0) text = "event " + std::to_string(action.event);
  if (action.layer >= 0) text += (text.empty() ? "layer " : ", layer ") + std::to_string(action.layer);
  return text;
}

std::string show(const ScheduleSet& set, const RunSchedule& schedule, const DeviceTraits& device) {
  const std::vector<ActionTime> times = simulate(set, schedule, device);
  std::string text = fmt::format("{}: {} actions, {}\n", schedule.name, schedule.actions.size(),
                                 format_duration(simulated_seconds(set, schedule, device)));
  for (std::size_t i = 0; i < schedule.actions.size(); ++i) {
    const Action& action = schedule.actions[i];
    const std::string title = title_of(set, action);
    const bool moves = action.reads + action.writes > 0;
    text += fmt::format("{:>6}  {:<13} {:<8} {:<{}}", i, name_of(action.lane), verb_of(set, action), title,
                        moves ? 40 : title.size());
    if (moves)
      text += fmt::format(" {:>9} {:>9.1f} us  {} -> {}", format_bytes(bytes_of(schedule, action)),
                          (times[i].end - times[i].begin) * 1e6, value_list(set, schedule.reads(action)),
                          value_list(set, schedule.writes(action)));
    text += "\n";
  }
  return text;
}

}  // namespace

std::string show_schedules(const Plan& plan, const DeviceTraits& device, std::string_view run) {
  std::string text, known;
  for (const RunSchedule& schedule : plan.schedules.runs) {
    if (schedule.empty()) continue;
    known += (known.empty() ? "" : ", ") + schedule.name;
    if (run.empty() || run == schedule.name) text += show(plan.schedules, schedule, device);
  }
  if (text.empty())
    throw Error(
        ErrorCode::config,
        {.where = "--run", .what = "no run of that name in this plan", .found = std::string(run), .expected = known});
  return text;
}

double add_events(std::vector<TimelineEvent>& events, const Plan& plan, Run run, const std::vector<ActionTime>& times,
                  double begin) {
  const RunSchedule& schedule = plan.schedules[run];
  const StoreOwners owners(plan);
  double end = begin;
  for (std::size_t i = 0; i < times.size(); ++i) {
    const Action& action = schedule.actions[i];
    end = std::max(end, begin + times[i].end);
    if (action.kind == ActionKind::record || action.kind == ActionKind::wait) continue;
    std::string name = title_of(plan.schedules, action);
    if (action.task < 0) name = verb_of(plan.schedules, action);
    if (action.kind == ActionKind::get || action.kind == ActionKind::put)
      name += " " + std::string(name_of(owners.moved(schedule, action)));
    events.push_back(
        {std::move(name), schedule.name, action.lane, begin + times[i].begin, times[i].end - times[i].begin});
  }
  for (const auto& [time, owner] : store_waits(plan, schedule, times))
    events.push_back({"wait for " + std::string(name_of(owner)), schedule.name, Lane::compute, begin + time.begin,
                      time.end - time.begin});
  return end;
}

std::vector<TimelineEvent> simulated_timeline(const Plan& plan, const DeviceTraits& device) {
  std::vector<TimelineEvent> events;
  double begin = 0;
  const Run first = plan.schedules.run_of({.last = false, .updates = true});
  for (Run run : {Run::upload, first, Run::upload, plan.schedules.run_of({.first = false}), Run::update, Run::result})
    begin = add_events(events, plan, run, simulate(plan.schedules, plan.schedules[run], device), begin);
  return events;
}

std::string timeline_json(const std::vector<TimelineEvent>& events, std::string_view title) {
  nlohmann::json list = nlohmann::json::array();
  list.push_back({{"ph", "M"}, {"pid", 0}, {"name", "process_name"}, {"args", {{"name", title}}}});
  for (int lane = 0; lane < kLanes; ++lane)
    list.push_back({{"ph", "M"},
                    {"pid", 0},
                    {"tid", lane},
                    {"name", "thread_name"},
                    {"args", {{"name", name_of(static_cast<Lane>(lane))}}}});
  for (const TimelineEvent& event : events)
    list.push_back({{"ph", "X"},
                    {"pid", 0},
                    {"tid", static_cast<int>(event.lane)},
                    {"name", event.name},
                    {"cat", event.run},
                    {"ts", event.begin * 1e6},
                    {"dur", event.seconds * 1e6}});
  return nlohmann::json{{"displayTimeUnit", "ms"}, {"otherData", {{"made_by", "quern"}}}, {"traceEvents", list}}.dump();
}

}  // namespace quern
