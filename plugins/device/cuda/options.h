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
        "GPU to plan for, by this name or its product's (RTX 4090); auto: the first one here, or else an H100")
      .one_of(assumable_gpus())
      .spelled(gpu_products());
  t.add("memory", &CudaOptions::memory, "MiB of device memory that the run may take; 0: nearly all")
      .at_least(0)
      .at_most(1 << 30);
  t.add("attention", &CudaOptions::attention,
        "auto: the fastest that takes the shape; cudnn: cuDNN or an error; own: simple kernels, slower")
      .one_of({"auto", "cudnn", "own"});
  t.add("matmul_candidates", &CudaOptions::matmul_candidates,
        "algorithms of cuBLASLt's list that are timed for each matrix product, of which it offers 8 at most; 1: "
        "nothing is timed, and the first is taken where no choice is known")
      .at_least(1)
      .at_most(64);
  t.add("matmul_search", &CudaOptions::matmul_search,
        "for products that are not quern's own in any case; listed: that list alone, in milliseconds a product; wide: "
        "on compute capability 9.0 also configurations that it lacks, and own products (products = auto), in up to a "
        "second for each large product at a first start")
      .one_of({"wide", "listed"});
  t.add("matmul_cache", &CudaOptions::matmul_cache, "keep timed choices on disk, in the user's cache directory");
  t.add("products", &CudaOptions::products,
        "auto: quern's own products with scales of squares, and where swiglu or its gradient follows in the same "
        "kernel; of bf16, and of 8-bit floats with other scales of blocks, own ones where a wide search finds them "
        "faster, else cuBLASLt's; library: cuBLASLt's; own: quern's wherever "
        "they take the product, on compute capability 9.0, in 8 bits with fast sums. i8 takes own ones in any case, "
        "and so does what the library has no product for: an operand of 8 bits that lies across the sums")
      .one_of({"auto", "library", "own"});
  return t;
}

}  // namespace quern::cuda
