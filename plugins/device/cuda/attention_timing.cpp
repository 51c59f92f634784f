#include "attention_timing.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "check.h"
#include "matmul_scratch.h"

namespace quern::cuda {

AttentionScratch::AttentionScratch(const AttentionShape& shape, std::size_t workspace, cudaStream_t stream) {
  auto rounded = [](std::int64_t count, std::size_t size) {
    return (static_cast<std::size_t>(count) * size + 255) / 256 * 256;
  };
  const std::size_t packed = rounded(shape.tokens() * shape.packed(), 2),
                    width = rounded(shape.tokens() * shape.width(), 2),
                    statistics = rounded(shape.tokens() * shape.heads, 4);
  if (cudaMalloc(&memory_, 2 * packed + 2 * width + statistics + workspace) != cudaSuccess) {
    cudaGetLastError();
    memory_ = nullptr;
    return;
  }
  char* next = static_cast<char*>(memory_);
  auto take = [&next](std::size_t bytes) { return std::exchange(next, next + bytes); };
  char *qkv = take(packed), *dqkv = take(packed), *y = take(width), *dy = take(width), *logsumexp = take(statistics);
  fill_random(qkv, packed, DType::bf16, 1, stream);
  fill_random(y, width, DType::bf16, 2, stream);
  fill_random(dy, width, DType::bf16, 3, stream);
  QUERN_CUDA(cudaMemsetAsync(logsumexp, 0, statistics, stream));
  operands_ = {
      .qkv = qkv, .y = y, .logsumexp = reinterpret_cast<float*>(logsumexp), .dy = dy, .dqkv = dqkv, .workspace = next};
}

AttentionScratch::~AttentionScratch() { cudaFree(memory_); }

float best_of_rounds(cudaStream_t stream, const std::function<void()>& body) {
  cudaEvent_t from = nullptr, to = nullptr;
  QUERN_CUDA(cudaEventCreate(&from));
  QUERN_CUDA(cudaEventCreate(&to));
  float best = std::numeric_limits<float>::infinity();
  for (int round = 0; round < 3; ++round) {
    constexpr int kRuns = 3;
    QUERN_CUDA(cudaEventRecord(from, stream));
    for (int run = 0; run < kRuns; ++run) body();
    QUERN_CUDA(cudaEventRecord(to, stream));
    QUERN_CUDA(cudaEventSynchronize(to));
    float milliseconds = 0;
    QUERN_CUDA(cudaEventElapsedTime(&milliseconds, from, to));
    best = std::min(best, milliseconds / kRuns);
  }
  cudaEventDestroy(from);
  cudaEventDestroy(to);
  return best;
}

}  // namespace quern::cuda
