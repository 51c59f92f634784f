// A plan from its options: what they leave open is chosen, schedules are made, and what does not fit is refused.
#include <cstdlib>
#include <functional>

#include "plan/choice/choose.h"
#include "plan/choice/refusal.h"
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

/// What ranks choose must be the same on all: each would find other times for its own shards.
Choice choose_for_all_ranks(Trials& trials, const PlanParts& parts, PlanOptions options) {
  options.state.rank = 0;
  return choose(trials, parts, options, Reach::shares);
}

/// The plan of another rank by the same choice.
Plan plan_of_rank(Trials& trials, const PlanParts& parts, const Choice& choice, int rank) {
  const PlanParts own = parts.with(*choice.precision);
  PlanOptions options = choice.plan.options;
  options.state.rank = rank;
  Plan plan = trials.plan(own, options, choice.recompute, [](const Plan&) { return true; });
  plan.decisions = choice.plan.decisions;
  add_schedules(plan, own.device);
  return plan;
}

[[noreturn]] void fail(const std::vector<std::string>& faults) {
  std::string list;
  for (const std::string& fault : faults) list += "\n  " + fault;
  fail_internal("plan", "the schedule is not valid:" + list);
}

Choice chosen(Trials& trials, const PlanParts& parts, const PlanOptions& options) {
  Choice choice = choose_for_all_ranks(trials, parts, options);
  if (choice.fits && choice.plan.schedules.runs.empty()) add_schedules(choice.plan, parts.device);
  return choice;
}

void verify_ranks(Trials& trials, const PlanParts& parts, const Choice& choice) {
  std::vector<Plan> others;
  others.reserve(static_cast<std::size_t>(choice.plan.options.state.ranks));
  std::vector<const ScheduleSet*> ranks;
  for (int rank = 0; rank < choice.plan.options.state.ranks; ++rank) {
    const Plan& plan = rank == 0 ? choice.plan : others.emplace_back(plan_of_rank(trials, parts, choice, rank));
    if (const std::vector<std::string> faults = schedule_faults(plan); !faults.empty()) fail(faults);
    ranks.push_back(&plan.schedules);
  }
  if (const std::vector<std::string> faults = rank_faults(ranks); !faults.empty()) fail(faults);
}

void add_schedules(Plan& plan, const Device& device, const std::function<bool(const Run&)>& wanted) {
  const DeviceTraits& traits = device.traits();
  plan.schedules = make_schedules(plan, wanted);
  make_resident(plan.schedules, plan.ring, plan.alignment);
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

/// Whether an estimate is of that run.
bool is_timed(const Plan& plan, const Run& run) {
  if (!plan.options.train || run.kind != Run::Kind::micro_step)
    return run == (plan.options.train ? Run::update : Run::evaluate);
  const MicroStep& step = run.step;
  if (step.observed || step.updates != (step.first && plan.defers_update())) return false;
  return run == Run::later || (plan.options.accumulation == 1 ? step.first : !(step.first && step.last));
}

}  // namespace

void add_schedules(Plan& plan, const Device& device) {
  add_schedules(plan, device, [](const Run&) { return true; });
}

void add_estimates(Plan& plan, const Device& device) {
  add_schedules(plan, device, [&](const Run& run) { return is_timed(plan, run); });
  plan.schedules = {};
}

ProgramChoice program_choice(const PlanParts& parts, const PlanOptions& options) {
  Trials trials;
  Choice choice = choose_for_all_ranks(trials, parts, options);
  return {parts.with(*choice.precision), std::move(choice.recompute)};
}

void verify_all_ranks(const PlanParts& parts, const Plan& plan) {
  Trials trials;
  verify_ranks(trials, parts, chosen(trials, parts, plan.options));
}

Plan make_plan(const PlanParts& parts, const PlanOptions& options) {
  check_placement(options.state);
  if (parts.model.traits().layers < 1)
    throw Error(ErrorCode::config, {.where = "model",
                                    .what = "number of layers",
                                    .found = std::to_string(parts.model.traits().layers),
                                    .expected = "at least 1"});
  Trials trials;
  Choice choice = chosen(trials, parts, options);
  if (!choice.fits) refuse(parts, options, choice.plan);
  if (verifies()) verify_ranks(trials, parts, choice);
  if (options.state.rank != 0) return plan_of_rank(trials, parts, choice, options.state.rank);
  return std::move(choice.plan);
}

}  // namespace quern
