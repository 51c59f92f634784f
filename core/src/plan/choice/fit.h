#pragma once
// What to recompute: the policy of the options, or as little as fits.

#include <functional>

#include "plan/planner.h"

namespace quern {

/// A choice, and the plan with it, which has no schedules.
struct Fit {
  RecomputeChoice choice;
  Plan plan;
};

/// Sets to recompute, from everything to as little as helps. Where state is kept makes no difference to them.
using RecomputePath = std::vector<std::set<std::string>>;
RecomputePath path_for(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered);

using PlanTest = std::function<bool(const Plan&)>;

/// What the options name; without slots where the plan is not `worth_slots`.
Fit fit_named(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered,
              const PlanTest& worth_slots);
/// The least recomputation on the path whose plan `fits_all` memories; where even the most does not fit, that.
Fit fit_within(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered, const RecomputePath& path,
               const PlanTest& fits_all);

}  // namespace quern
