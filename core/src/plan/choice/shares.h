#pragma once
// Trials beside the fastest placement of whole kinds: shares of a kind's layers on the device, other stores for
// the optimizer's state, and how many logits are made at once.

#include "plan/choice/fit.h"

namespace quern {

/// Tries shares of the saved activations and of each kind in a store that `options` leave to the planner, one kind
/// after the other, each with as little recomputation as fits, and keeps what makes the step of `best`, which fits,
/// faster. Where `best` recomputes or moves activations the same also begins with moments. `parts` are of its form.
void try_shares(Trials& trials, const PlanParts& parts, const PlanOptions& options, Choice& best);

/// The same for the tokens whose logits are made at once, where the options name none. Other numbers change the order
/// of sums.
void try_chunks(Trials& trials, const PlanParts& parts, const PlanOptions& options, Choice& best);

/// Fills what a budget leaves with values of stores and ranks that several windows of a run read, so that they come
/// once.
void keep_reused(const PlanParts& parts, const PlanOptions& options, Choice& best);

}  // namespace quern
