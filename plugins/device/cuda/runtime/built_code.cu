#include "runtime/built_code.h"

#include <cuda_runtime_api.h>

#include "runtime/check.h"

namespace quern::cuda {

static __global__ void probe_kernel() {}

std::string missing_code() {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe_kernel));
  if (status != cudaErrorNoKernelImageForDevice && status != cudaErrorInvalidDeviceFunction) {
    check_status(status, "cudaFuncGetAttributes", __FILE__, __LINE__);
    return {};
  }
  cudaGetLastError();
  return QUERN_CUDA_ARCHITECTURES;
}

bool is_compiled_by_driver() {
  cudaFuncAttributes attributes;
  QUERN_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe_kernel)));
  return attributes.ptxVersion < attributes.binaryVersion;  // equal where ptxas was run at the build
}

}  // namespace quern::cuda
