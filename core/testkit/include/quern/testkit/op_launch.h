#pragma once
// One launch of an op on copies of its inputs, for ops that write what they read or whose results feed other ops.

#include <vector>

#include "quern/device.h"
#include "quern/testkit/compare.h"

namespace quern::testkit {

/// Outputs, then the inputs after the launch; absent ones are empty. `op` has its outputs, and `inputs` in the order of
/// its inputs. `in_place`: pairs of an output and the input that it is. An accumulating output is added to the value
/// that fill_added_to leaves. `device` is open and must take the op. Bytes written beside an operand are an internal
/// error.
std::vector<PoisonedTensor> launch_once(Device& device, const OpInstance& op, const std::vector<View>& inputs,
                                        const std::vector<std::pair<int, int>>& in_place = {});

/// The bytes of an accumulating output before a launch that is compared: bytes 0x40, which as f32 and as bf16 are 3.0
/// or nearly so. An absent one is not touched.
void fill_added_to(Device& device, const View& output, Stream stream);

}  // namespace quern::testkit
