#include "plan/time/step_time.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/format.h"

namespace quern {

namespace {

/// Whose what a launch works on in a store is; the first of them.
std::optional<TensorOwner> owner_in_place(const RunSchedule& schedule, const Action& action,
                                          const StoreOwners& owners) {
  for (const Access& access : schedule.operands_of(action))
    if (access.place.present() && access.place.space == Space::store) return owners.of(access.place);
  return {};
}

}  // namespace

StoreOwners::StoreOwners(const Plan& plan) {
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.store >= 0) begins_.try_emplace({tensor.store, tensor.offset}, tensor.owner);
}

TensorOwner StoreOwners::of(const Place& in_store) const {
  return std::prev(begins_.upper_bound({in_store.index, in_store.offset}))->second;
}

TensorOwner StoreOwners::moved(const RunSchedule& schedule, const Action& transfer) const {
  return of((transfer.kind == ActionKind::get ? schedule.reads(transfer) : schedule.writes(transfer))[0].place);
}

// While kernels wait, gets may wait for puts in turn. One that works in place waits for as long as it takes beyond its
// own time.
std::vector<StoreWait> store_waits(const Plan& plan, const RunSchedule& schedule,
                                   const std::vector<ActionTime>& times) {
  const StoreOwners owners(plan);
  std::vector<StoreWait> transfers, waits;
  double total = 0;
  for (std::size_t i = 0; i < times.size(); ++i) {
    const Action& action = schedule.actions[i];
    total = std::max(total, times[i].end);
    if (action.kind == ActionKind::launch)
      if (const std::optional<TensorOwner> owner = owner_in_place(schedule, action, owners)) {
        const double computed = times[i].begin + plan.schedules.task_of(action).seconds;
        if (computed < times[i].end) waits.push_back({{computed, times[i].end}, *owner});
      }
    if (action.kind != ActionKind::get && action.kind != ActionKind::put) continue;
    transfers.push_back({times[i], owners.moved(schedule, action)});
  }
  std::sort(transfers.begin(), transfers.end(),
            [](const StoreWait& a, const StoreWait& b) { return a.time.end < b.time.end; });
  auto add = [&](double now, double end) {
    for (auto it = std::upper_bound(transfers.begin(), transfers.end(), now,
                                    [](double at, const StoreWait&transfer) { return at < transfer.time.end; });
         it != transfers.end() && now < end; ++it) {
      const double until = std::min(end, it->time.end);
      if (until <= std::max(now, it->time.begin)) continue;
      waits.push_back({{now, until}, it->owner});
      now = until;
    }
  };
  double busy = 0;
  for (std::size_t i = 0; i < times.size() && !transfers.empty(); ++i) {
    if (schedule.actions[i].lane != Lane::compute) continue;
    if (schedule.actions[i].kind == ActionKind::wait) add(busy, times[i].begin);
    busy = std::max(busy, times[i].end);
  }
  add(busy, total);
  std::sort(waits.begin(), waits.end(),
            [](const StoreWait& a, const StoreWait& b) { return a.time.begin < b.time.begin; });
  return waits;
}

std::vector<std::pair<Run, std::int64_t>> runs_of_step(const Plan& plan, std::int64_t micro_batches) {
  std::vector<std::pair<Run, std::int64_t>> runs;
  auto add = [&](std::int64_t times, bool first, bool last) {
    const Run run = plan.schedules.run_of({.first = first, .last = last, .updates = true});
    if (!runs.empty() && runs.back().first == run)
      runs.back().second += times;
    else
      runs.emplace_back(run, times);
  };
  add(1, true, micro_batches == 1);
  if (micro_batches > 2) add(micro_batches - 2, false, false);
  if (micro_batches > 1) add(1, false, true);
  runs.emplace_back(Run::update, 1);
  return runs;
}

StepTime step_time(const Plan& plan, std::int64_t micro_batches,
                   const std::function<std::vector<ActionTime>(Run)>& times) {
  StepTime step;
  for (const auto& [run, count] : runs_of_step(plan, micro_batches)) {
    const std::vector<ActionTime> of_run = times(run);
    double end = 0;
    for (const ActionTime& time : of_run) end = std::max(end, time.end);
    step.total += static_cast<double>(count) * end;
    for (const auto& [time, owner] : store_waits(plan, plan.schedules[run], of_run))
      step.unhidden[owner] += static_cast<double>(count) * (time.end - time.begin);
    for (const Action& action : plan.schedules[run].actions) {
      if (action.kind != ActionKind::launch) continue;
      const Task& task = plan.schedules.task_of(action);
      if (task.slow.empty()) continue;
      SlowLaunches& slow = step.slow[task.slow];
      slow.seconds += static_cast<double>(count) * task.seconds;
      slow.fast_seconds += static_cast<double>(count) * task.fast_seconds;
    }
  }
  return step;
}

StepTime simulated_step(const Plan& plan, const DeviceTraits& device, std::int64_t micro_batches) {
  return step_time(plan, micro_batches, [&](Run run) { return simulate(plan.schedules, plan.schedules[run], device); });
}

std::string waits_text(const StepTime& step) {
  std::vector<std::string> waits;
  for (const auto& [owner, seconds] : step.unhidden)
    waits.push_back(format_duration(seconds) + " for " + std::string(name_of(owner)));
  return format_list(waits);
}

std::vector<std::string> slow_texts(const StepTime& step) {
  std::vector<std::string> texts;
  for (const auto& [reason, slow] : step.slow)
    texts.push_back(fmt::format("{}: about {} of a step ({:.0f}%), otherwise {}", reason, format_duration(slow.seconds),
                                100 * slow.seconds / step.total, format_duration(slow.fast_seconds)));
  return texts;
}

}  // namespace quern
