#pragma once
// Chooses what the options leave open, for the fastest step that fits the budgets: one search over these knobs, from
// the outermost.
//
//   parallel.zero          every stage
//   train.micro_batch      divisors of a step's sequences, from large to small, up to the second slower one in a row
//   train.loss_chunk       where logits take more memory than layers: kSmallChunk; at the end some others
//   precision's "auto"     every form of the backend
//   memory.master, ...     all of a kind on the device or in the first store: every combination that bounds leave; then
//                          one kind at a time shares of its layers, and other stores for the optimizer's state
//   memory.recompute       the config's own, or as little as fits (Trials::within)
//   bytes that are left    for values of stores and ranks that several windows of a run read

#include <optional>

#include "plan/choice/trials.h"

namespace quern {

/// Tokens whose logits are made at once, where the device's own choice takes too much.
inline constexpr std::int64_t kSmallChunk = 1024;

/// How many of the knobs are searched, each with those before it.
enum class Reach : std::uint8_t {
  kinds,        ///< whole kinds of state, forms, and recomputation
  shares,       ///< and the rest of the budget: all that changes no bit of a sum
  micro_batch,  ///< and the logits made at once, for the same sequences in a step
  sharding,     ///< of a run of several ranks
};

/// Where nothing fits, what comes nearest.
Choice choose(Trials& trials, const PlanParts& parts, const PlanOptions& options, Reach reach);
Choice choose(const PlanParts& parts, const PlanOptions& options, Reach reach);

/// Of shares, and the same on all ranks: each would find other times for its own shards.
Choice choose_for_all_ranks(Trials& trials, const PlanParts& parts, PlanOptions options);

/// Of whole kinds; none: nothing fits.
std::optional<Choice> choose_fitting(const PlanParts& parts, const PlanOptions& options);

}  // namespace quern
