#pragma once
// What a data source gives for a micro-batch, checked and put where it is sent from.

#include <cstddef>

#include "plan/plan.h"
#include "quern/data_source.h"

namespace quern {

/// Writes the plan's inputs, all but the step's state, one after another from `to` on; returns the end. A config error
/// if the batch lacks one, an input error if an integer is not below its bound.
std::byte* put_inputs(const Plan& plan, const Batch& batch, std::byte* to);

}  // namespace quern
