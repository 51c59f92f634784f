// A plan from its options: what they leave open is chosen, schedules are made, and what does not fit is refused.
#include <cstdlib>

#include "plan/choice/refusal.h"
#include "plan/choice/shares.h"
#include "plan/laws/check_schedules.h"
#include "plan/planner.h"
#include "plan/schedule/make_schedules.h"
#include "plan/schedule/synchronize.h"
#include "plan/time/estimate.h"
#include "plan/time/simulate.h"
#include "plan/time/step_time.h"
#include "quern/error.h"

namespace quern {

namespace {

bool verifies() {
#ifdef NDEBUG
  return std::getenv("QUERN_VERIFY_PLANS") != nullptr;  // set for all tests
#else
  return true;
#endif
}

[[noreturn]] void fail(const std::vector<std::string>& faults) {
  std::string list;
  for (const std::string& fault : faults) list += "\n  " + fault;
  fail_internal("plan", "the schedule is not valid:" + list);
}

}  // namespace

void add_schedules(Plan& plan, const Device& device) {
  const DeviceTraits& traits = device.traits();
  plan.schedules = make_schedules(plan);
  make_resident(plan.schedules, plan.ring, static_cast<std::int64_t>(traits.alignment));
  synchronize(plan.schedules);
  for (Task& task : plan.schedules.tasks) {
    const OpSupport support = device.query(task.instance);
    task.seconds = launch_seconds(support, task.cost, traits);
    task.slow = support.slow;
    task.fast_seconds = support.fast_seconds;
  }
  const RunSchedule& micro_step = plan.schedules[plan.options.train ? Run::later : Run::evaluate];
  plan.seconds_per_micro_step = simulated_seconds(plan.schedules, micro_step, traits);
  if (plan.options.train) plan.seconds_per_step = simulated_step(plan, traits, plan.options.accumulation).total;
  double flops = 0;
  for (const Action& action : micro_step.actions) {
    if (action.kind != ActionKind::launch) continue;
    const Task& task = plan.schedules.tasks[static_cast<std::size_t>(action.task)];
    if (task.cost.tensor_core && task.phase != Phase::recompute) flops += task.cost.flops;
  }
  plan.flops_per_token = flops / static_cast<double>(plan.options.geometry.tokens());
}

ProgramChoice program_choice(const PlanParts& parts, const PlanOptions& options) {
  Choice choice = choose_with_shares(parts, options);
  return {parts.with(*choice.precision), std::move(choice.recompute)};
}

void verify(const Plan& plan) {
  if (const std::vector<std::string> faults = schedule_faults(plan); !faults.empty()) fail(faults);
}

void verify_all_ranks(const PlanParts& parts, const Plan& plan) {
  verify(plan);
  std::vector<Plan> others;
  std::vector<const ScheduleSet*> ranks;
  others.reserve(static_cast<std::size_t>(plan.options.state.ranks));
  for (int rank = 0; rank < plan.options.state.ranks; ++rank) {
    if (rank == plan.options.state.rank) {
      ranks.push_back(&plan.schedules);
      continue;
    }
    PlanOptions options = plan.options;
    options.state.rank = rank;
    others.push_back(choose(parts, options).plan);
    verify(others.back());
    ranks.push_back(&others.back().schedules);
  }
  for (int run = 0; run < kRuns; ++run)
    if (const std::vector<std::string> faults = rank_faults(ranks, static_cast<Run>(run)); !faults.empty())
      fail(faults);
}

Plan make_plan(const PlanParts& parts, const PlanOptions& options) {
  check_placement(options.state);
  if (parts.model.traits().layers < 1)
    throw Error(ErrorCode::config, {.where = "model",
                                    .what = "number of layers",
                                    .found = std::to_string(parts.model.traits().layers),
                                    .expected = "at least 1"});
  Choice choice = choose_with_shares(parts, options);
  if (!choice.fits) refuse(parts, options, choice.plan);
  if (verifies()) verify_all_ranks(parts, choice.plan);
  return std::move(choice.plan);
}

}  // namespace quern
