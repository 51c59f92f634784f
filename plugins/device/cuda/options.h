#pragma once
// Options of the table [device.cuda].

#include <cstdint>
#include <string>

#include "quern/options.h"
#include "runtime/gpu_table.h"

namespace quern::cuda {

struct CudaOptions {
  std::string assume = "auto";
  std::int64_t memory = 0;
  std::string attention = "auto";
  std::int64_t matmul_candidates = 8;
  std::string matmul_search = "wide";
  bool matmul_cache = true;
  std::string products = "auto";
};

inline OptionTable<CudaOptions> cuda_options() {
  OptionTable<CudaOptions> t;
  t.add("assume", &CudaOptions::assume,
        "GPU to plan for, by this name or its product name (RTX 4090); auto: the first one here, or else an H100")
      .one_of(assumable_gpus())
      .spelled(gpu_products());
  t.add("memory", &CudaOptions::memory, "MiB of device memory that the run may use; 0: nearly all")
      .at_least(0)
      .at_most(1 << 30);
  t.add("attention", &CudaOptions::attention,
        "auto: the fastest that supports the shape; cudnn: cuDNN or an error; own: simple kernels, slower")
      .one_of({"auto", "cudnn", "own"});
  t.add("matmul_candidates", &CudaOptions::matmul_candidates,
        "number of cuBLASLt's listed algorithms that are timed for each GEMM, at most 8; 1: no timing, the first is "
        "used unless a choice is cached")
      .at_least(1)
      .at_most(64);
  t.add("matmul_search", &CudaOptions::matmul_search,
        "search for GEMMs that are not always quern's own; listed: only that list, in milliseconds a GEMM; wide: on "
        "compute capability 9.0 also other configurations and quern's own GEMMs (products = auto), in up to a second "
        "for each large GEMM at a first start")
      .one_of({"wide", "listed"});
  t.add("matmul_cache", &CudaOptions::matmul_cache, "keep timed choices on disk, in the user's cache directory");
  t.add("products", &CudaOptions::products,
        "GEMMs. auto: quern's own for tile scales and for fusion with swiglu or its gradient; for bf16 and 1 x 128 "
        "block scales the faster in a wide search, else cuBLASLt's; library: cuBLASLt's; own: quern's where supported, "
        "on compute capability 9.0, in 8 bits with fast accumulation. i8, and 8-bit operands that are not K-major, "
        "always use quern's own")
      .one_of({"auto", "library", "own"});
  return t;
}

}  // namespace quern::cuda
