#pragma once
// What the system has to grant before the device's threads work: OpenMP and the BLAS crash, hang or end the program
// where it does not. Each check throws a resources error.

namespace quern::cpu {

/// Address space for `threads` threads and what the BLAS takes for them.
void check_address_space(int threads);
/// Threads: OpenMP ends the program when it cannot start one.
void check_threads(int threads);
/// Enough stack for each; afterwards OpenMP's threads are there.
void check_stacks(int threads);

}  // namespace quern::cpu
