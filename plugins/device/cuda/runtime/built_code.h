#pragma once
// Whether this build has kernels for a GPU: code for one architecture does not run on another.

#include <string>

namespace quern::cuda {

/// Empty when the current GPU can run this build's kernels; else what they were built for.
std::string missing_code();

/// Whether this build has code for sm_90a, which alone has Hopper's own instructions.
bool has_hopper_code();

}  // namespace quern::cuda
