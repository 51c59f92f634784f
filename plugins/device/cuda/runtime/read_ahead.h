#pragma once

namespace quern::cuda {

/// Asks the system to read the files that hold the kernels of cuBLASLt and cuDNN, 0.9 GB, into its cache. A search for
/// the fastest kernels loads many of them; on a machine that has not read them since it was started it waits for the
/// disk here and there, some seconds in all. May block while the system takes the requests. Files that are not found
/// are passed over.
void read_ahead_libraries() noexcept;

}  // namespace quern::cuda
