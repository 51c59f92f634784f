#pragma once
// A choice, the limits that it has to hold, and what to recompute: the policy of the options, or as little as fits.

#include <functional>

#include "plan/planner.h"

namespace quern {

struct Choice {
  RecomputeChoice recompute;
  Plan plan;  ///< with estimates where it fits; else the one that comes nearest to it
  bool fits = false;
  const PrecisionBackend* precision = nullptr;  ///< the one of the parts' forms that it is for
};

inline constexpr const char* kRecomputeKey = "memory.recompute";
/// The recomputed values, as decisions list them.
std::string text_of(const RecomputeChoice& choice);

/// That more is recomputed than the config's own, with which the plan would take `named_bytes` of the device.
Decision recompute_decision(const PlanOptions& options, const RecomputeChoice& choice, std::int64_t named_bytes);

/// The recomputed values, and the plan with them, which has no schedules.
struct Fit {
  RecomputeChoice choice;
  Plan plan;
};

/// Sets to recompute, from everything to as little as helps. Where state is kept makes no difference to them.
using RecomputePath = std::vector<std::set<std::string>>;
RecomputePath path_for(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered);

/// Bytes above a limit; of limit 0: none.
std::int64_t above(std::int64_t bytes, std::int64_t limit);

/// Bytes that a plan may take; 0: any number. Stores also have capacities of their own, which the plan knows.
struct Limits {
  std::int64_t device = 0, host = 0, disk = 0;
  bool hold(const Plan& plan) const { return missing(plan) == 0; }
  /// Bytes that the plan takes above them.
  std::int64_t missing(const Plan& plan) const;
};
/// The least of budget and device memory; the others are their budgets.
Limits limits_of(const PlanParts& parts, const PlanOptions& options);

/// Whether the options have a budget, which lets the planner choose. Without one, all state is on the device.
bool chooses(const PlanOptions& options);

using PlanTest = std::function<bool(const Plan&)>;

/// What the options name; without slots where the plan is not `worth_slots`.
Fit fit_named(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered,
              const PlanTest& worth_slots);
/// The least recomputation on the path whose plan the limits hold; where even the most does not fit, that, without
/// slots. `guess` is the step of the path that is tried first, and becomes the one that fits.
Fit fit_within(const PlanParts& parts, const PlanOptions& options, const ProgramSet& lowered, const RecomputePath& path,
               const Limits& limits, std::size_t& guess);

}  // namespace quern
