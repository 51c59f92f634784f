#pragma once
// Whether this build has kernels for a GPU: code for one architecture does not run on another.

#include <string>

namespace quern::cuda {

/// Empty when the current GPU can run this build's kernels; else what they were built for.
std::string missing_code();

}  // namespace quern::cuda
