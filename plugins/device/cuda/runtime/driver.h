#pragma once
// Functions of the driver, which may be absent where plans are made: found by the runtime, not linked.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "quern/error.h"
#include "runtime/check.h"

namespace quern::cuda {

/// Of the signature that CUDA `version` has for it. Throws a resources error when the driver is older.
template <class Function>
Function driver_function(const char* name, unsigned version = 12000) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  QUERN_CUDA(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess)
    throw Error(ErrorCode::resources, {.where = "device cuda",
                                       .what = "the driver is too old",
                                       .found = std::string("no ") + name,
                                       .expected = {},
                                       .next = "install the driver that the README names"});
  return reinterpret_cast<Function>(function);
}

}  // namespace quern::cuda
