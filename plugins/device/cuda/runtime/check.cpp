#include "runtime/check.h"

#include <string>
#include <string_view>

#include "quern/error.h"

namespace quern::cuda {

namespace {

[[noreturn]] void fail(const char* call, const char* file, int line, std::string found) {
  std::string_view path(file);
  std::string_view name = path.substr(path.rfind('/') == std::string_view::npos ? 0 : path.rfind('/') + 1);
  throw Error(ErrorCode::resources, {.where = "device cuda, " + std::string(name) + ":" + std::to_string(line),
                                     .what = std::string(call) + " failed",
                                     .found = std::move(found),
                                     .expected = {},
                                     .next = {}});
}

}  // namespace

void check_status(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  fail(call, file, line, std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")");
}

void check_status(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(call, file, line, std::string(cublasLtGetStatusName(status)) + " (" + cublasLtGetStatusString(status) + ")");
}

void check_status(cudnnStatus_t status, const char* call, const char* file, int line) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  char detail[512] = {};
  cudnnGetLastErrorString(detail, sizeof detail);
  fail(call, file, line, std::string(cudnnGetErrorString(status)) + (detail[0] ? ": " : "") + detail);
}

}  // namespace quern::cuda
