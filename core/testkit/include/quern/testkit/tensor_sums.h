#pragma once
// Whether a device's sum_squares of a tensor depends on that tensor alone. Gradients may then be summed in any
// grouping, and a step gives the same bits however they were grouped.

#include <cstddef>
#include <string>

#include "quern/device.h"

namespace quern::testkit {

/// The instance that `tensor_sums_fault` launches most of, for `query`.
OpInstance sum_of_one_tensor(DType dtype);

/// Sums each of 1000 tensors of 0 to 300001 elements alone, then in lists of 1, 447, 448, 449 and 1000 tensors and in a
/// list of lists of uneven lengths. In lists, tensors begin at multiples of `alignment` bytes, or of their element's
/// size where that is larger; alone, at the device's own alignment. `device` is open and takes sum_squares. Empty when
/// every sum has the same bits wherever it was taken; else the first that does not.
std::string tensor_sums_fault(Device& device, DType dtype, std::size_t alignment);

}  // namespace quern::testkit
