#pragma once
// One launch of an op on copies of its inputs, for ops that write what they read or whose results feed other ops.

#include <vector>

#include "quern/device.h"
#include "quern/testkit/compare.h"

namespace quern::testkit {

/// Outputs, then the inputs as they are left; what is absent is empty. `op` has its outputs; its inputs are those of
/// the views. `in_place`: pairs of an output and the input that it is. What accumulates is added to threes, or nearly
/// so. `device` is open and must take the op.
std::vector<PoisonedTensor> launch_once(Device& device, const OpInstance& op, const std::vector<View>& inputs,
                                        const std::vector<std::pair<int, int>>& in_place = {});

}  // namespace quern::testkit
