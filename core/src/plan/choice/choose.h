#pragma once
// Chooses where state is kept and the recomputed values: the planner's part of the options, for the fastest step that
// fits the budgets.

#include <optional>

#include "plan/choice/fit.h"

namespace quern {

/// Tokens whose logits are made at once, where the device's own choice takes too much.
inline constexpr std::int64_t kSmallChunk = 1024;

/// The fastest that fits, of all placements, each with as little recomputation as fits, and of all forms of the
/// precision backend; none: nothing fits.
std::optional<Choice> choose_fitting(const PlanParts& parts, const PlanOptions& options);

/// The same; where nothing fits, what comes nearest.
Choice choose(const PlanParts& parts, const PlanOptions& options);

/// What choose() finds, then shares of it (shares.h), and what fits beside them.
Choice choose_with_shares(Trials& trials, const PlanParts& parts, const PlanOptions& options);

/// Chooses what changes the order of sums too, for the fastest step of the same sequences: the micro-batch, and where
/// logits take more memory than layers the tokens whose logits are made at once; then shares. Where none
/// fits, as choose does. Micro-batches are tried from large to small, up to the second in a row that is slower than the
/// best.
Choice choose_with_micro_batch(const PlanParts& parts, const PlanOptions& options);

/// The same for a run of several ranks whose sharding is open too, of all stages of ZeRO.
Choice choose_with_sharding(const PlanParts& parts, const PlanOptions& options);

}  // namespace quern
