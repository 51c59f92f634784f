#include "plan/time/step_time.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "base/format.h"

namespace quern {

namespace {

/// Whose what a launch works on in a store is; the first of them.
std::optional<TensorOwner> owner_in_place(const RunSchedule& schedule, const Action& action,
                                          const StoreOwners& owners) {
  for (const auto& accesses : {schedule.reads(action), schedule.writes(action)})
    for (const Access& access : accesses)
      if (access.place.present() && access.place.space == Space::store) return owners.of(access.place);
  return {};
}

/// Of one run.
StepTime run_time(const Plan& plan, Run run, const DeviceTraits& device) {
  const RunSchedule& schedule = plan.schedules[run];
  const std::vector<ActionTime> times = simulate(plan.schedules, schedule, device);
  StepTime step;
  for (const ActionTime& time : times) step.total = std::max(step.total, time.end);
  for (const StoreWait& wait : store_waits(plan, schedule, times))
    step.unhidden[wait.owner] += wait.time.end - wait.time.begin;
  return step;
}

}  // namespace

StoreOwners::StoreOwners(const Plan& plan) {
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.store >= 0) begins_.try_emplace({tensor.store, tensor.offset}, tensor.owner);
  for (const Slab& slab : plan.slabs)
    if (slab.store >= 0) begins_.try_emplace({slab.store, slab.offset}, TensorOwner::activation);
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
        const double computed = times[i].begin + plan.schedules.tasks[static_cast<std::size_t>(action.task)].seconds;
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
    add(busy, times[i].begin);
    busy = std::max(busy, times[i].end);
  }
  add(busy, total);
  std::sort(waits.begin(), waits.end(),
            [](const StoreWait& a, const StoreWait& b) { return a.time.begin < b.time.begin; });
  return waits;
}

StepTime simulated_step(const Plan& plan, const DeviceTraits& device, std::int64_t micro_batches) {
  StepTime step;
  auto add = [&](Run run, std::int64_t times) {
    const StepTime one = run_time(plan, run, device);
    step.total += static_cast<double>(times) * one.total;
    for (const auto& [owner, seconds] : one.unhidden) step.unhidden[owner] += static_cast<double>(times) * seconds;
  };
  for (std::int64_t i = 0; i < micro_batches; ++i) {
    const bool first = i == 0, last = i + 1 == micro_batches, inner = !first && !last;
    add(plan.schedules.run_of({.first = first, .last = last, .updates = first && plan.defers_update()}),
        inner ? micro_batches - 2 : 1);
    if (inner) i = micro_batches - 2;
  }
  add(Run::update, 1);
  return step;
}

std::string waits_text(const StepTime& step) {
  std::vector<std::string> waits;
  for (const auto& [owner, seconds] : step.unhidden)
    waits.push_back(format_duration(seconds) + " for " + std::string(name_of(owner)));
  return format_list(waits);
}

}  // namespace quern
