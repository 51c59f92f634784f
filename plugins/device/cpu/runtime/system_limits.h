#pragma once
// Limits that the system must grant before the device's threads work: OpenMP and the BLAS crash, hang or end the
// program where it does not. Each check throws a resources error. `threads` are those that run kernels together: the
// compute stream's and its team.

#include <cstddef>

namespace quern::cpu {

inline constexpr int kOtherStreams = 3;  ///< beside the compute stream: a thread each, once it is used

/// Address space for all threads and what the BLAS takes for them.
void check_address_space(int threads);
/// Threads: OpenMP ends the program when it cannot start one.
void check_threads(int threads);
/// Makes the calling thread's OpenMP team and returns the bytes of the smallest stack among them.
std::size_t least_stack(int threads);
/// Refuses a stack that is too small for kernels.
void check_stack(std::size_t bytes);

}  // namespace quern::cpu
