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

/// Bytes that a plan may take; 0: any number.
struct Limits {
  std::int64_t device = 0, host = 0;
  bool hold(const Plan& plan) const { return missing(plan) == 0; }
  /// Bytes that the plan takes above them.
  std::int64_t missing(const Plan& plan) const;
};
/// The least of budget and device memory; the host's is its budget.
Limits limits_of(const PlanParts& parts, const PlanOptions& options);

using PlanTest = std::function<bool(const Plan&)>;

/// What the options name; without slots where the plan is not `worth_slots`.
Fit fit_named(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered,
              const PlanTest& worth_slots);
/// The least recomputation on the path whose plan the limits hold; where even the most does not fit, that, without
/// slots. `guess` is the step of the path that is tried first, and becomes the one that fits.
Fit fit_within(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered, const RecomputePath& path,
               const Limits& limits, std::size_t& guess);

}  // namespace quern
