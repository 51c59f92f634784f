#pragma once
// Options of the table [device.cpu].

#include <cstdint>

#include "blas.h"
#include "quern/options.h"

namespace quern::cpu {

struct CpuOptions {
  std::int64_t threads = 0;
  std::int64_t memory = 0;
};

inline OptionTable<CpuOptions> cpu_options() {
  OptionTable<CpuOptions> t;
  t.add("threads", &CpuOptions::threads,
        "threads that kernels use, which changes no bit; 0: OMP_NUM_THREADS, or else all cores, 128 at most")
      .at_least(0)
      .at_most(kMostThreads);
  t.add("memory", &CpuOptions::memory, "MiB that the run may take; 0: all physical memory")
      .at_least(0)
      .at_most(1 << 30);
  return t;
}

}  // namespace quern::cpu
