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

}  // namespace quern::cuda
