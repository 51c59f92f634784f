#pragma once
// Shares of a kind's layers on the device, where whole kinds leave room or take too much of it.

#include "plan/choice/choose.h"

namespace quern {

/// Tries shares of each kind that `options` leave to the planner, one kind after the other, each with as little
/// recomputation as fits, and keeps what makes the step of `best`, which fits, faster. `parts` are of its form.
void try_shares(const PlanParts& parts, const PlanOptions& options, Choice& best);

/// What choose() finds, then shares of it.
Choice choose_with_shares(const PlanParts& parts, const PlanOptions& options);

}  // namespace quern
