#pragma once
// The numbers that turn heads. Su et al., "RoFormer" (2021).

#include <cstdint>

#include "quern/device.h"

namespace quern::rope {

/// For positions from `begin` to before `end`, of the op's `inverse_frequencies`, or its `long_inverse_frequencies` where
/// its sequence is longer than `long_beyond`: half a head of cosines, then as many sines times `turn`, 1 or -1 for the
/// inverse. They are multiplied by the op's `magnitude`, but for frequency 0: such pairs are left as they are. Computed
/// in double; `rows` is (end - begin, 2, half).
void make_rows(const OpInstance& op, std::int64_t begin, std::int64_t end, double turn, float* rows);

}  // namespace quern::rope
