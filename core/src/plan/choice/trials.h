#pragma once
// A choice, the limits that it has to hold, and what to recompute: the policy of the options, or as little as fits.

#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/planner.h"

namespace quern {

struct Choice {
  RecomputeChoice recompute = {};
  Plan plan = {};  ///< with estimates where it fits; else the one that comes nearest to it
  bool fits = false;
  const PrecisionBackend* precision = nullptr;  ///< the one of the parts' forms that it is for
};

inline constexpr const char* kRecomputeKey = "memory.recompute";
/// The recomputed values, as decisions list them.
std::string text_of(const RecomputeChoice& choice);

/// That more is recomputed than the config's own, with which the plan would take `named_bytes` of the device.
Decision recompute_decision(const PlanOptions& options, const RecomputeChoice& choice, std::int64_t named_bytes);

/// Bytes above a limit; of limit 0: none.
std::int64_t above(std::int64_t bytes, std::int64_t limit);

/// What no recomputation frees of the device.
std::int64_t least_device_bytes(const Plan& plan);
/// And of host memory, or of stores elsewhere.
std::int64_t least_stored_bytes(const Plan& plan, bool host);

/// Bytes that a plan may take; 0: any number. Stores also have capacities of their own, which the plan knows.
struct Limits {
  std::int64_t device = 0, host = 0, disk = 0;
  bool hold(const Plan& plan) const { return missing(plan) == 0; }
  /// Bytes that the plan takes above them.
  std::int64_t missing(const Plan& plan) const;
  /// The same whatever is recomputed, and without slots.
  std::int64_t least_missing(const Plan& plan) const;
};
/// The least of budget and device memory; the others are their budgets.
Limits limits_of(const PlanParts& parts, const PlanOptions& options);

/// Whether the options have a budget, which lets the planner choose. Without one, all state is on the device.
bool chooses(const PlanOptions& options);

using PlanTest = std::function<bool(const Plan&)>;

/// Plans of a search, whose options differ by the micro-batch, the tokens whose logits are made at once, and where
/// state is; and its memo: what such plans have in common is made once.
class Trials {
 public:
  /// Without slots where the plan is not `worth_slots`.
  Plan plan(const PlanParts& parts, const PlanOptions& options, const RecomputeChoice& choice,
            const PlanTest& worth_slots);
  /// With the recomputation that the options name.
  Choice named(const PlanParts& parts, const PlanOptions& options, const PlanTest& worth_slots);
  /// The least recomputation whose plan the limits hold; where even the most does not fit, that, without slots.
  Choice within(const PlanParts& parts, const PlanOptions& options, const Limits& limits);

 private:
  struct Programs {
    Programs(const PlanParts& of, const PlanOptions& options) : parts(of), lowered(parts, options) {}
    const PlanParts parts;  // which `lowered` borrows
    const ProgramSet lowered;
    /// Up to eight, of one key: by recomputed values, and the classes of layers.
    std::map<std::tuple<std::set<std::string>, std::set<std::string>, std::vector<std::pair<int, bool>>>,
             ChosenPrograms>
        chosen = {};
    std::vector<std::set<std::string>> path = {};  // to recompute, from everything to as little as helps
    std::size_t step = 0;                          // of the path, that fitted last
  };
  /// By the form of the precision backend, the micro-batch and the chunk of logits.
  std::map<std::tuple<const PrecisionBackend*, std::int64_t, std::int64_t>, Programs> known_;

  Programs& programs(const PlanParts& parts, const PlanOptions& options);
};

}  // namespace quern
