// A plan from its options: what they leave open is chosen, schedules are made, and what does not fit is refused.
#include <cstdlib>

#include "plan/choice/choose.h"
#include "plan/choice/refusal.h"
#include "plan/laws/check_schedules.h"
#include "plan/planner.h"
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

}  // namespace

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
