#pragma once
// What of a run's state is updated together. State that stores have comes and goes in windows of a planned size: some
// tensors of a layer, or some rows of one. Updating it in other parts changes no bit.

#include <span>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace quern {

/// All parts in one window, in the order of the parameters.
std::vector<UpdateWindow> one_update(const Plan& plan);
/// Windows of at most PlanOptions::update_window_bytes, where their parts can be as small, in the order of the forward
/// pass; each of one group or layer. Slices begin at multiples of Plan::alignment in every format. Programs are
/// empty. `refreshes` make all rows of working copies, by parameter and layer class. All ranks have as many windows of
/// their shards, of the same parts.
std::vector<UpdateWindow> split_update(const Plan& plan, const std::vector<std::vector<Program>>& refreshes);

}  // namespace quern
