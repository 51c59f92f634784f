#pragma once
// Plans for a given choice; make_plan (plan.h) makes the choice.

#include <functional>
#include <set>
#include <string>

#include "plan/plan.h"
#include "plan/programs/program_set.h"

namespace quern {

/// What plans have in common that recompute the same, wherever state is: finished programs, placed, of `lowered`, which
/// is of these parts, and of these options or such with other placements.
struct ChosenPrograms {
  ChosenPrograms(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered,
                 const RecomputeChoice& choice);
  ProgramSet set;
  Plan plan;  ///< the programs alone
  std::set<std::string> refusals = {};
};

/// Adds the programs of state and lays memory out; every placement is chosen. What the device cannot run is a resources
/// error; whether the plan fits is not looked at. Slots take schedules to lay out: a plan that is not `worth_slots` has
/// none.
Plan plan_with(const PlanParts& parts, const PlanOptions& options, const ChosenPrograms& programs,
               const std::function<bool(const Plan&)>& worth_slots);

/// Makes its schedules and estimates.
void add_schedules(Plan& plan, const Device& device);
/// The estimates alone, of the runs that a step has.
void add_estimates(Plan& plan, const Device& device);

}  // namespace quern
