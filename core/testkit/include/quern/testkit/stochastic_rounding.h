#pragma once
// Whether a device rounds stochastically as documented: one independent draw for each element of each tensor in each
// step. Comparison with the oracle cannot tell, since a bit of the value before rounding moves the result a whole step.

#include <string>

#include "quern/device.h"

namespace quern::testkit {

/// The update that is looked at: adamw with bf16 master and moments.
OpInstance rounded_update();

/// Runs it on `device`, open and taking it, for 2^17 equal elements in two steps, and as another object. Empty when
/// roundings up come at the rate that the value before them asks for, which is the oracle's in fp32, independent
/// between neighbours, tensors, steps and objects; else what was found.
std::string stochastic_rounding_fault(Device& oracle, Device& device);

}  // namespace quern::testkit
