#pragma once
// The ops squared_relu, y = max(x, 0)^2 (So et al., "Primer", 2021), and its gradient: what they are, for the core's
// passes, and how the CPU device runs them.

#include "quern/plugin.h"

namespace squared_relu {

/// Declares both ops and their kernels.
void add_ops(quern::Manifest& manifest);

}  // namespace squared_relu
