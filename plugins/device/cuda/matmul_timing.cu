#include "matmul_timing.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <limits>

#include "check.h"
#include "matmul_plan.h"
#include "quern/block_scales.h"

namespace quern::cuda {

namespace {

__device__ __forceinline__ std::uint32_t mix(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

/// Sum of four uniform numbers, scaled to deviation 1.
__device__ __forceinline__ float normal_like(std::uint32_t index, std::uint32_t seed) {
  std::uint32_t r = mix(index ^ seed * 0x9e3779b9u);
  float sum = static_cast<float>((r & 255u) + ((r >> 8) & 255u) + ((r >> 16) & 255u) + (r >> 24));
  return (sum - 510.0f) * (1.0f / 147.8f);
}

template <class T>
__global__ void fill_kernel(T* memory, std::size_t count, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    memory[i] = T(normal_like(static_cast<std::uint32_t>(i), seed));
  }
}

template <class T>
void fill(void* memory, std::size_t bytes, std::uint32_t seed, cudaStream_t stream) {
  std::size_t count = bytes / sizeof(T);
  if (count == 0) return;
  unsigned blocks = static_cast<unsigned>(std::min<std::size_t>((count + 255) / 256, 4096));
  fill_kernel<<<blocks, 256, 0, stream>>>(static_cast<T*>(memory), count, seed);
  QUERN_CUDA(cudaGetLastError());
}

/// Operands of a product in one allocation; empty when there is no memory for them.
class Scratch {
 public:
  Scratch(const MatmulKey& key, cudaStream_t stream) {
    const std::int64_t rows_a = key.transpose_a ? key.k : key.m, columns_a = key.transpose_a ? key.m : key.k;
    const std::int64_t rows_b = key.transpose_b ? key.n : key.k, columns_b = key.transpose_b ? key.k : key.n;
    const std::size_t a = bytes(key.a, rows_a * std::max(columns_a, key.stride_a)),
                      b = bytes(key.b, rows_b * std::max(columns_b, key.stride_b)),
                      y = bytes(key.y, key.m * std::max(key.n, key.stride_y));
    const std::int64_t lines = of_blocks(key.scales) ? scale_blocks(key.k) : 1;  // square ones are no more
    const std::size_t vectors = bytes(DType::f32, lines * std::max<std::int64_t>({key.m, key.n, 4}));
    if (cudaMalloc(&memory_, a + b + y + 3 * vectors + kMatmulWorkspace) != cudaSuccess) {
      cudaGetLastError();
      memory_ = nullptr;
      return;
    }
    char* next = static_cast<char*>(memory_);
    auto take = [&next](std::size_t size) { return std::exchange(next, next + size); };
    char *a_at = take(a), *b_at = take(b), *y_at = take(y);
    char *bias = take(vectors), *scale_a = take(vectors), *scale_b = take(vectors);
    fill_random(a_at, a, key.a, 1, stream);
    fill_random(b_at, b, key.b, 2, stream);
    fill_random(y_at, y, key.y, 3, stream);
    QUERN_CUDA(cudaMemsetAsync(bias, 0, 3 * vectors, stream));
    operands_ = {a_at, b_at, bias, reinterpret_cast<float*>(scale_a), reinterpret_cast<float*>(scale_b), y_at, next};
  }
  ~Scratch() { cudaFree(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  explicit operator bool() const { return memory_ != nullptr; }
  const MatmulOperands& operands() const { return operands_; }

 private:
  static std::size_t bytes(DType type, std::int64_t count) {
    return (static_cast<std::size_t>(count) * size_of(type) + 255) / 256 * 256;
  }
  void* memory_ = nullptr;
  MatmulOperands operands_;
};

struct Events {
  Events() {
    QUERN_CUDA(cudaEventCreate(&from));
    QUERN_CUDA(cudaEventCreate(&to));
  }
  ~Events() {
    cudaEventDestroy(from);
    cudaEventDestroy(to);
  }
  cudaEvent_t from = nullptr, to = nullptr;
};

/// Milliseconds a run, the best of two rounds; infinity when the algorithm fails.
float time_of(CudaContext& context, const MatmulPlan& plan, const cublasLtMatmulAlgo_t& algorithm,
              const MatmulOperands& operands, const Events& events) {
  constexpr float kFailed = std::numeric_limits<float>::infinity();
  auto round = [&](int runs) {
    QUERN_CUDA(cudaEventRecord(events.from, context.setup));
    for (int i = 0; i < runs; ++i) {
      if (plan.try_run(context.lt, operands, algorithm, context.setup) != CUBLAS_STATUS_SUCCESS) return kFailed;
    }
    QUERN_CUDA(cudaEventRecord(events.to, context.setup));
    QUERN_CUDA(cudaEventSynchronize(events.to));
    float milliseconds = 0;
    QUERN_CUDA(cudaEventElapsedTime(&milliseconds, events.from, events.to));
    return milliseconds / static_cast<float>(runs);
  };
  if (round(1) == kFailed) return kFailed;  // loads the kernel
  float once = round(1);
  if (once == kFailed) return kFailed;
  int runs = std::clamp(static_cast<int>(3.0f / std::max(once, 1e-3f)), 2, 50);
  return std::min(round(runs), round(runs));
}

}  // namespace

void fill_random(void* memory, std::size_t bytes, DType type, std::uint32_t seed, cudaStream_t stream) {
  switch (type) {
    case DType::f32: return fill<float>(memory, bytes, seed, stream);
    case DType::bf16: return fill<__nv_bfloat16>(memory, bytes, seed, stream);
    case DType::e4m3: return fill<__nv_fp8_e4m3>(memory, bytes, seed, stream);
    case DType::e5m2: return fill<__nv_fp8_e5m2>(memory, bytes, seed, stream);
    default: QUERN_CUDA(cudaMemsetAsync(memory, 1, bytes, stream));
  }
}

TimedChoice choose_by_time(CudaContext& context, const MatmulKey& key,
                           const std::vector<cublasLtMatmulAlgo_t>& candidates) {
  TimedChoice choice;
  choice.algorithm = candidates.front();
  MatmulKey timed = key;
  for (int attempt = 0; attempt < 5; ++attempt) {
    Scratch scratch(timed, context.setup);
    if (!scratch) {  // halve the longest dimension, keeping it a multiple of 128
      std::int64_t& longest = std::max({std::ref(timed.m), std::ref(timed.n), std::ref(timed.k)},
                                       [](std::int64_t& x, std::int64_t& y) { return x < y; });
      if (longest < 256) return choice;
      longest = longest / 2 / 128 * 128;
      continue;
    }
    MatmulPlan plan(timed);
    Events events;
    choice.best_ms = std::numeric_limits<float>::infinity();
    for (const cublasLtMatmulAlgo_t& algorithm : candidates) {
      const int place = choice.tried++;
      if (!plan.accepts(context.lt, algorithm)) continue;
      const float time = time_of(context, plan, algorithm, scratch.operands(), events);
      if (place == 0) choice.first_ms = time;
      if (time >= choice.best_ms) continue;
      choice.algorithm = algorithm;
      choice.timed = true;
      choice.best_ms = time;
      choice.place = place;
    }
    QUERN_CUDA(cudaStreamSynchronize(context.setup));
    return choice;
  }
  return choice;
}

}  // namespace quern::cuda
