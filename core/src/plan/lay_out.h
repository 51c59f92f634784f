#pragma once
// The places of a plan: tensors, saved activations, buffers and slots, each at its offset in the device's
// arena or in a store, and the bytes of each owner.

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/programs/state_programs.h"

namespace quern {

/// What parameters have beside masters, gradients and the optimizer's state.
struct PlannedTensors {
  std::map<std::string, std::vector<std::vector<Value>>> copies;  ///< working copies by parameter and layer class
  std::set<std::string> whole_masters;                            ///< parameters whose masters programs read
  std::vector<ScaledMaster> scaled;                               ///< those whose amax ranks make together
};

/// `plan` has its programs, parameters and updates. Slots are laid out where it is `worth_slots` with all else.
void lay_out(Plan& plan, const PlanParts& parts, const PlannedTensors& tensors,
             const std::function<bool(const Plan&)>& worth_slots);

/// The first part of it: what parameters have.
void lay_out_parameters(Plan& plan, const PlanParts& parts, const PlannedTensors& tensors);

/// Adds options.kept_bytes behind the slots, which are the last of the arena.
void lay_out_kept(Plan& plan);

}  // namespace quern
