#include "plan/step_time.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "plan/simulate.h"

namespace quern {

namespace {

using Owners = std::map<std::pair<std::int32_t, std::int64_t>, TensorOwner>;  // by store and offset

Owners owners_in_stores(const Plan& plan) {
  Owners owners;
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.store >= 0) owners.try_emplace({tensor.store, tensor.offset}, tensor.owner);
  return owners;
}

struct Transfer {
  ActionTime time;
  TensorOwner owner;
};

/// Of one run. While kernels wait, gets may wait for puts in turn.
StepTime run_time(const Plan& plan, Run run, const DeviceTraits& device, const Owners& owners) {
  const RunSchedule& schedule = plan.schedules[run];
  const std::vector<ActionTime> times = simulate(plan.schedules, schedule, device);
  StepTime step;
  std::vector<Transfer> transfers;
  for (std::size_t i = 0; i < times.size(); ++i) {
    const Action& action = schedule.actions[i];
    step.total = std::max(step.total, times[i].end);
    if (action.kind != ActionKind::get && action.kind != ActionKind::put) continue;
    const Place& home = (action.kind == ActionKind::get ? schedule.reads(action) : schedule.writes(action))[0].place;
    transfers.push_back({times[i], std::prev(owners.upper_bound({home.index, home.offset}))->second});
  }
  std::sort(transfers.begin(), transfers.end(),
            [](const Transfer& a, const Transfer& b) { return a.time.end < b.time.end; });
  double busy = 0;
  auto waits = [&](double now, double end) {
    for (auto it = std::upper_bound(transfers.begin(), transfers.end(), now,
                                    [](double at, const Transfer&transfer) { return at < transfer.time.end; });
         it != transfers.end() && now < end; ++it) {
      const double until = std::min(end, it->time.end);
      if (until <= std::max(now, it->time.begin)) continue;
      step.unhidden[it->owner] += until - now;
      now = until;
    }
  };
  for (std::size_t i = 0; i < times.size(); ++i) {
    if (schedule.actions[i].lane != Lane::compute) continue;
    waits(busy, times[i].begin);
    busy = std::max(busy, times[i].end);
  }
  waits(busy, step.total);
  return step;
}

}  // namespace

StepTime simulated_step(const Plan& plan, const DeviceTraits& device, std::int64_t micro_batches) {
  const Owners owners = owners_in_stores(plan);
  StepTime step;
  auto add = [&](Run run, std::int64_t times) {
    const StepTime one = run_time(plan, run, device, owners);
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

}  // namespace quern
