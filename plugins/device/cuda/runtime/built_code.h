#pragma once
// Whether this build has kernels for a GPU: code for one architecture does not run on another.

#include <string>

namespace quern::cuda {

/// Empty when the current GPU can run this build's kernels; else what they were built for.
std::string missing_code();

/// Whether this build has PTX alone for the current GPU: the driver compiles each kernel at its first use, once on a
/// machine. For a GPU with no missing_code().
bool is_compiled_by_driver();

}  // namespace quern::cuda
