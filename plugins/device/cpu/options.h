#pragma once
// Options of the table [device.cpu].

#include <cstdint>
#include <string>

#include "products/blas.h"
#include "quern/options.h"

namespace quern::cpu {

struct CpuOptions {
  std::int64_t threads = 0;
  std::int64_t memory = 0;
  std::string streams = "threads";
  std::int64_t shuffle_seed = 0;
};

inline OptionTable<CpuOptions> cpu_options() {
  OptionTable<CpuOptions> t;
  t.add("threads", &CpuOptions::threads,
        "threads that kernels use, which changes no bit; 0: OMP_NUM_THREADS, or else all cores, 128 at most")
      .at_least(0)
      .at_most(kMostThreads);
  t.add("memory", &CpuOptions::memory, "MiB that the run may use; 0: all physical memory").at_least(0).at_most(1 << 30);
  t.add("streams", &CpuOptions::streams,
        "execution of streams, which changes no bit: threads, one a stream; or, to test schedules, shuffled: when the "
        "host waits, on its thread, in a random order of the actions that are ready")
      .one_of({"threads", "shuffled"});
  t.add("shuffle_seed", &CpuOptions::shuffle_seed, "seed of the random order of shuffled streams").at_least(0);
  return t;
}

}  // namespace quern::cpu
