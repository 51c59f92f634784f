#pragma once
// Options of the table [device.cuda].

#include <cstdint>
#include <string>

#include "gpu_table.h"
#include "quern/options.h"

namespace quern::cuda {

struct CudaOptions {
  std::string assume = "auto";
  std::int64_t memory = 0;
  std::string attention = "auto";
  std::int64_t matmul_candidates = 8;
  bool matmul_cache = true;
};

inline OptionTable<CudaOptions> cuda_options() {
  OptionTable<CudaOptions> t;
  t.add("assume", &CudaOptions::assume, "GPU to plan for; auto: the first one here, or else an H100")
      .one_of(assumable_gpus());
  t.add("memory", &CudaOptions::memory, "MiB of device memory that the run may take; 0: nearly all").at_least(0);
  t.add("attention", &CudaOptions::attention,
        "auto: the fastest that takes the shape; cudnn: cuDNN or an error; own: simple kernels, slower")
      .one_of({"auto", "cudnn", "own"});
  t.add("matmul_candidates", &CudaOptions::matmul_candidates,
        "algorithms that are timed for each matrix product; cuBLASLt offers 8 at most")
      .at_least(1)
      .at_most(64);
  t.add("matmul_cache", &CudaOptions::matmul_cache, "keep timed choices on disk, in the user's cache directory");
  return t;
}

}  // namespace quern::cuda
