#pragma once
// Launching kernels: every kernel takes one struct of arguments, so that all instantiations of a template are one type
// of function and `prepare` can keep the ones that an op instance needs. Preparing loads the code: under capture the
// runtime may not.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "runtime/check.h"

namespace quern::cuda {

template <class Arguments>
using KernelFunction = void (*)(Arguments);

/// A kernel that is loaded.
template <class Arguments>
struct LoadedKernel {
  KernelFunction<Arguments> function = nullptr;
  dim3 block;
  int resident = 0;  ///< blocks that the whole GPU runs at once

  void launch(std::int64_t blocks, cudaStream_t stream, Arguments arguments) const {
    void* pointers[] = {&arguments};
    dim3 grid(static_cast<unsigned>(blocks));
    QUERN_CUDA(cudaLaunchKernel(reinterpret_cast<const void*>(function), grid, block, pointers, 0, stream));
  }
  /// Blocks for `work` pieces, one a block at a time: no more than run at once.
  std::int64_t persistent(std::int64_t work) const {
    return std::max<std::int64_t>(1, std::min<std::int64_t>(work, resident));
  }
};

template <class Arguments>
LoadedKernel<Arguments> load_kernel(KernelFunction<Arguments> function, dim3 block, int multiprocessors) {
  cudaFuncAttributes attributes;
  QUERN_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(function)));  // loads the code
  int blocks = 0;
  QUERN_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, reinterpret_cast<const void*>(function),
                                                           static_cast<int>(block.x * block.y), 0));
  return {function, block, std::max(1, blocks) * multiprocessors};
}

constexpr std::int64_t ceil_divide(std::int64_t total, std::int64_t part) { return (total + part - 1) / part; }

}  // namespace quern::cuda
