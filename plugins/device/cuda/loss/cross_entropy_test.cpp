// What the comparisons of lm_loss with the CPU device do not reach: plans that share a kernel.
#include "loss/cross_entropy.h"

#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include "runtime/check.h"
#include "runtime/gpu_table.h"
#include "tests/device_pair.h"

using namespace quern;
using namespace quern::cuda;

TEST_CASE("a plan for a large vocabulary still launches after one for a small vocabulary was made") {
  const DevicePair pair = open_pair();
  if (!pair.open) return;
  const CudaTraits gpu = facts_of_unit(0).cuda;
  // The first keeps 64 KiB of a row in shared memory, beyond what a kernel gets without asking; the second 8 KiB.
  const CrossEntropy large = make_cross_entropy(DType::bf16, 32768, true, DType::bf16, 0, gpu);
  make_cross_entropy(DType::bf16, 8192 + 8, true, DType::bf16, 0, gpu);
  auto zeros = [](std::size_t bytes) {
    void* memory = nullptr;
    QUERN_CUDA(cudaMalloc(&memory, bytes));
    QUERN_CUDA(cudaMemset(memory, 0, bytes));
    return memory;
  };
  void *logits = zeros(static_cast<std::size_t>(large.stride) * 2), *target = zeros(4), *loss = zeros(4);
  cross_entropy(large, logits, nullptr, static_cast<std::int32_t*>(target), static_cast<float*>(loss), 1, nullptr);
  float got = 0;
  QUERN_CUDA(cudaMemcpy(&got, loss, sizeof got, cudaMemcpyDeviceToHost));
  CHECK(std::abs(got - std::log(32768.0f)) < 1e-3f);
  for (void* memory : {logits, target, loss}) cudaFree(memory);
}
