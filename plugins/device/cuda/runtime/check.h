#pragma once
// Every CUDA, cuBLASLt and cuDNN call is checked: a failure becomes a resources Error with the call's text, the status
// name and what it means. Kernel launches are followed by QUERN_CUDA(cudaGetLastError()).

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>

namespace quern::cuda {

void check_status(cudaError_t status, const char* call, const char* file, int line);
void check_status(cublasStatus_t status, const char* call, const char* file, int line);
void check_status(cudnnStatus_t status, const char* call, const char* file, int line);

}  // namespace quern::cuda

#define QUERN_CUDA(call) ::quern::cuda::check_status((call), #call, __FILE__, __LINE__)
#define QUERN_CUBLAS(call) QUERN_CUDA(call)
#define QUERN_CUDNN(call) QUERN_CUDA(call)
