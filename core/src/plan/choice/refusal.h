#pragma once
// The error of a run that fits nowhere: the use of the memory, the shortage, and the changes that cost least.

#include "plan/plan.h"

namespace quern {

/// Throws a resources error. `nearest` is the plan that lacks least.
[[noreturn]] void refuse(const PlanParts& parts, const PlanOptions& options, const Plan& nearest);

}  // namespace quern
