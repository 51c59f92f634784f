#pragma once
// Plans for a given choice; make_plan (plan.h) makes the choice.

#include <functional>

#include "plan/plan.h"
#include "plan/programs/program_set.h"

namespace quern {

/// Runs the passes after lowering and lays memory out; every placement is chosen. `lowered` are the programs of these
/// parts and options, or of such with other placements. What the device cannot run is a resources error; whether the
/// plan fits is not looked at. Slots take schedules to lay out: a plan that is not `worth_slots` has none.
Plan plan_with(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered,
               const RecomputeChoice& choice, const std::function<bool(const Plan&)>& worth_slots);

/// Makes its schedules and estimates.
void add_schedules(Plan& plan, const Device& device);
/// The estimates alone, of the runs that a step has.
void add_estimates(Plan& plan, const Device& device);

/// What make_plan would choose of the programs: the form of the precision backend, and recomputation.
struct ProgramChoice {
  PlanParts parts;
  RecomputeChoice recompute;
};
ProgramChoice program_choice(const PlanParts& parts, const PlanOptions& options);

}  // namespace quern
