#include "loss/cross_entropy.h"

#include <cuda_pipeline.h>

#include <algorithm>

#include "primitives/scale.cuh"
#include "primitives/vector.cuh"
#include "runtime/check.h"

namespace quern::cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kRegisterRounds = 6;  ///< packs that each thread keeps in registers, where shared memory is not enough

/// e^x for x <= 0. In bf16 the fast one errs far below the format's step.
template <class T>
__device__ __forceinline__ float exponential(float x);
template <>
__device__ __forceinline__ float exponential<float>(float x) {
  return expf(x);
}
template <>
__device__ __forceinline__ float exponential<bf16>(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}

/// Largest logit so far and the sum of exponentials relative to it (Milakov & Gimelshein, "Online normalizer
/// calculation for softmax", 2018).
struct Running {
  float maximum = -INFINITY;
  float sum = 0;
};

template <class T>
__device__ __forceinline__ Running combine(Running a, Running b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  auto scaled = [maximum](const Running& r) {
    return r.maximum == maximum ? r.sum : r.sum * exponential<T>(r.maximum - maximum);
  };
  return {maximum, scaled(a) + scaled(b)};
}

template <class T>
__device__ __forceinline__ void take(Running& running, const Floats<T>& x) {
  float maximum = x.at[0];
#pragma unroll
  for (int i = 1; i < kPack<T>; ++i) maximum = fmaxf(maximum, x.at[i]);
  if (maximum > running.maximum) {
    running.sum *= exponential<T>(running.maximum - maximum);
    running.maximum = maximum;
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) sum += exponential<T>(x.at[i] - running.maximum);
  running.sum += sum;
}

/// The whole warp's; every lane gets the same bits, because combining commutes.
template <class T>
__device__ __forceinline__ Running reduce_warp(Running mine) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    mine = combine<T>(mine, {__shfl_xor_sync(~0u, mine.maximum, offset), __shfl_xor_sync(~0u, mine.sum, offset)});
  return mine;
}

/// The whole block's; every thread gets it. `shared` has room for one entry a warp.
template <class T>
__device__ __forceinline__ Running reduce(Running mine, Running* shared) {
  mine = reduce_warp<T>(mine);
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) shared[threadIdx.x / kWarp] = mine;
  __syncthreads();
  return reduce_warp<T>(lane < static_cast<int>(blockDim.x) / kWarp ? shared[lane] : Running{});
}

struct Arguments {
  void* logits;
  std::uint8_t* codes;  ///< of the gradients; null: they replace the logits
  const std::int32_t* targets;
  float* losses;
  std::int64_t vocabulary, stride;
  int shared_rounds;
  float z_loss, seed, cap;
  DType code_format;
  float code_inverse;
};

/// A logit under the soft cap, rounded as logits are.
template <class T>
__device__ __forceinline__ float capped(float x, float cap) {
  return to_float(from_float<T>(cap * tanhf(x / cap)));
}

/// Elements of the pack that begins at element `at` and are below the vocabulary's end; -inf in the others' place.
template <bool kCap, class T>
__device__ __forceinline__ Floats<T> logits_of(const Pack<T>& pack, std::int64_t at, const Arguments& a) {
  Floats<T> x = unpack(pack);
  constexpr int kCount = kPack<T>;
  if constexpr (kCap) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x.at[i] = capped<T>(x.at[i], a.cap);
  }
  if (at + kCount > a.vocabulary) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (at + i >= a.vocabulary) x.at[i] = -INFINITY;
  }
  return x;
}

template <bool kCap, class T>
__device__ __forceinline__ float logit_at(const Arguments& a, const T* row, std::int32_t target) {
  const float logit = to_float(row[target]);
  return kCap ? capped<T>(logit, a.cap) : logit;
}

/// A pack's gradients, quantized or in the place of the logits.
template <bool kCodes, class T>
__device__ __forceinline__ void store_gradients(const Arguments& a, T* row, std::int64_t at,
                                                const Floats<T>& gradient) {
  if constexpr (kCodes) {
    std::uint32_t words[kPack<T> / 4];
    encode_float8(gradient.at, a.code_format, a.code_inverse, words);
    std::uint8_t* to = a.codes + blockIdx.x * a.vocabulary + at;
    if constexpr (kPack<T> == 8)
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    else
      *reinterpret_cast<std::uint32_t*>(to) = words[0];
  } else {
    *reinterpret_cast<Pack<T>*>(row + at) = round_pack(gradient);
  }
}

template <class T>
__device__ __forceinline__ void report(const Arguments& a, const Running& all, float chosen) {
  if (a.losses != nullptr) a.losses[blockIdx.x] = all.maximum + logf(all.sum) - chosen;
}

/// A row whose target does not count (-1), or is not in the vocabulary.
template <bool kCodes, class T>
__device__ __forceinline__ void skip_row(const Arguments& a, T* row, std::int32_t target, bool train) {
  if (threadIdx.x == 0 && a.losses != nullptr) a.losses[blockIdx.x] = target < 0 ? 0.0f : __int_as_float(0x7fc00000);
  if (!train) return;
  for (std::int64_t at = threadIdx.x * kPack<T>; at < a.vocabulary; at += std::int64_t{blockDim.x} * kPack<T>)
    store_gradients<kCodes>(a, row, at, Floats<T>{});
}

/// Gradient of one pack, stored.
template <bool kCodes, bool kCap, class T>
__device__ __forceinline__ void store_gradient(const Arguments& a, T* row, std::int64_t at, const Floats<T>& x,
                                               const Running& all, float factor, std::int32_t target, float seed) {
  Floats<T> gradient;
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    gradient.at[i] = exponential<T>(x.at[i] - all.maximum) * factor;
    if (at + i == target) gradient.at[i] -= seed;
    if constexpr (kCap)
      if (at + i < a.vocabulary) gradient.at[i] *= 1.0f - (x.at[i] / a.cap) * (x.at[i] / a.cap);
  }
  store_gradients<kCodes>(a, row, at, gradient);
}

/// A block a row. Thread t owns packs t, t + threads, ...: the first rounds are kept in shared memory, the next in
/// registers, any others are read again.
template <class T, int kRegisters, bool kCodes, bool kCap>
__global__ void __launch_bounds__(1024, 1) train_kernel(const Arguments a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* kept = reinterpret_cast<Pack<T>*>(shared_bytes);
  __shared__ Running warps[1024 / kWarp];
  T* row = static_cast<T*>(a.logits) + blockIdx.x * a.stride;
  const std::int32_t target = a.targets[blockIdx.x];
  if (target < 0 || target >= a.vocabulary) return skip_row<kCodes>(a, row, target, true);
  const std::int64_t step = std::int64_t{blockDim.x} * kPack<T>, begin = threadIdx.x * kPack<T>;

  // Everything is requested before anything is used. Shared memory comes in two groups, so that the first is summed
  // while the second is on its way. Each thread reads back only what it copied itself.
  const int half = a.shared_rounds / 2;
  for (int round = 0; round < a.shared_rounds; ++round) {
    const std::int64_t at = begin + round * step;
    if (round == half) __pipeline_commit();
    if (at < a.vocabulary) __pipeline_memcpy_async(&kept[round * blockDim.x + threadIdx.x], row + at, 16);
  }
  __pipeline_commit();
  const std::int64_t register_begin = begin + a.shared_rounds * step;
  Pack<T> held[kRegisters > 0 ? kRegisters : 1];
#pragma unroll
  for (int round = 0; round < kRegisters; ++round)
    held[round] = load_pack<Access::vector>(row, register_begin + round * step, a.vocabulary);
  const float chosen = logit_at<kCap>(a, row, target);

  Running running;
#pragma unroll
  for (int round = 0; round < kRegisters; ++round) {
    const std::int64_t at = register_begin + round * step;
    if (at < a.vocabulary) take(running, logits_of<kCap>(held[round], at, a));
  }
  const std::int64_t rest_begin = register_begin + kRegisters * step;
  for (std::int64_t at = rest_begin; at < a.vocabulary; at += step)
    take(running, logits_of<kCap>(load_pack<Access::vector>(row, at, a.vocabulary), at, a));
  auto kept_logits = [&](int round) {
    return logits_of<kCap>(kept[round * blockDim.x + threadIdx.x], begin + round * step, a);
  };
  if (half > 0) __pipeline_wait_prior(1);
  for (int round = 0; round < half; ++round)
    if (begin + round * step < a.vocabulary) take(running, kept_logits(round));
  __pipeline_wait_prior(0);
  for (int round = half; round < a.shared_rounds; ++round)
    if (begin + round * step < a.vocabulary) take(running, kept_logits(round));

  const Running all = reduce<T>(running, warps);
  const float logsumexp = all.maximum + logf(all.sum);
  if (threadIdx.x == 0) report<T>(a, all, chosen);
  const float factor = a.seed * (1.0f + 2.0f * a.z_loss * logsumexp) / all.sum;
  for (int round = 0; round < a.shared_rounds; ++round) {
    const std::int64_t at = begin + round * step;
    if (at < a.vocabulary) store_gradient<kCodes, kCap>(a, row, at, kept_logits(round), all, factor, target, a.seed);
  }
#pragma unroll
  for (int round = 0; round < kRegisters; ++round) {
    const std::int64_t at = register_begin + round * step;
    if (at < a.vocabulary)
      store_gradient<kCodes, kCap>(a, row, at, logits_of<kCap>(held[round], at, a), all, factor, target, a.seed);
  }
  for (std::int64_t at = rest_begin; at < a.vocabulary; at += step) {
    const Floats<T> x = logits_of<kCap>(load_pack<Access::vector>(row, at, a.vocabulary), at, a);
    store_gradient<kCodes, kCap>(a, row, at, x, all, factor, target, a.seed);
  }
}

template <class T, bool kCap>
__global__ void evaluate_kernel(const Arguments a) {
  __shared__ Running warps[1024 / kWarp];
  T* row = static_cast<T*>(a.logits) + blockIdx.x * a.stride;
  const std::int32_t target = a.targets[blockIdx.x];
  if (target < 0 || target >= a.vocabulary) return skip_row<false>(a, row, target, false);
  const std::int64_t step = std::int64_t{blockDim.x} * kPack<T>;
  Running running;
#pragma unroll 4
  for (std::int64_t at = threadIdx.x * kPack<T>; at < a.vocabulary; at += step)
    take(running, logits_of<kCap>(load_pack<Access::vector>(row, at, a.vocabulary), at, a));
  const Running all = reduce<T>(running, warps);
  if (threadIdx.x == 0) report<T>(a, all, logit_at<kCap>(a, row, target));
}

template <class T>
auto* kernel_of(const CrossEntropy& plan) {
  using Kernel = void (*)(Arguments);
  const std::int64_t packs = (plan.vocabulary + kPack<T> - 1) / kPack<T>;
  const bool held = packs > std::int64_t{plan.shared_rounds} * plan.threads;
  const bool caps = plan.cap > 0, codes = size_of(plan.gradient_format) == 1;
  if (!plan.train) return caps ? Kernel(evaluate_kernel<T, true>) : Kernel(evaluate_kernel<T, false>);
  if (caps)
    return codes ? Kernel(train_kernel<T, kRegisterRounds, true, true>)
                 : Kernel(train_kernel<T, kRegisterRounds, false, true>);
  if (codes)
    return held ? Kernel(train_kernel<T, kRegisterRounds, true, false>) : Kernel(train_kernel<T, 0, true, false>);
  return held ? Kernel(train_kernel<T, kRegisterRounds, false, false>) : Kernel(train_kernel<T, 0, false, false>);
}

int shared_size(const CrossEntropy& plan) { return plan.train ? plan.shared_rounds * plan.threads * 16 : 0; }

/// One block: its sum is short, and its threads fix the order whatever the GPU.
__global__ void loss_stats_kernel(const float* __restrict__ losses, const std::int32_t* __restrict__ targets,
                                  const float* __restrict__ correct, std::int64_t count, double* __restrict__ stats,
                                  LossTerm term, bool add) {
  __shared__ double sums[1024], valids[1024], rights[1024];
  double sum = 0, valid = 0, right = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += 1024) {
    if (targets[i] < 0) continue;
    sum += losses[i];
    valid += 1;
    if (correct != nullptr) right += correct[i];
  }
  sums[threadIdx.x] = sum;
  valids[threadIdx.x] = valid;
  rights[threadIdx.x] = right;
  for (int half = 512; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      sums[threadIdx.x] += sums[threadIdx.x + half];
      valids[threadIdx.x] += valids[threadIdx.x + half];
      rights[threadIdx.x] += rights[threadIdx.x + half];
    }
  }
  if (threadIdx.x != 0) return;
  stats[0] = (add ? stats[0] : 0) + term.weight * sums[0];
  stats[1] = (add ? stats[1] : 0) + (term.counts ? valids[0] : 0);
  stats[2] = (add ? stats[2] : 0) + rights[0];
  if (!add) stats[3] = 0;
}

__global__ void loss_stats_gradient_kernel(const std::int32_t* __restrict__ targets, std::int64_t count, float factor,
                                           float* __restrict__ gradient) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) gradient[i] = targets[i] >= 0 ? factor : 0.0f;
}

}  // namespace

std::int64_t logit_stride(std::int64_t vocabulary, DType dtype) {
  const auto pack = static_cast<std::int64_t>(16 / size_of(dtype));
  return (vocabulary + pack - 1) / pack * pack;
}

CrossEntropy make_cross_entropy(DType dtype, std::int64_t vocabulary, bool train, DType gradient_format, float cap,
                                const CudaTraits& gpu) {
  CrossEntropy plan;
  plan.cap = cap;
  plan.gradient_format = gradient_format;
  plan.dtype = dtype;
  plan.vocabulary = vocabulary;
  plan.stride = logit_stride(vocabulary, dtype);
  plan.train = train;
  const std::int64_t packs = plan.stride * static_cast<std::int64_t>(size_of(dtype)) / 16;
  const auto room = static_cast<std::int64_t>((gpu.shared_bytes - 1024) / 16);  // packs; the rest is static
  // Two blocks a multiprocessor, which alternate between computing and waiting, as long as the row fits half of it.
  plan.threads = packs < 256 ? 64 : packs < 1024 ? 128 : packs <= room / 2 / 512 * 512 ? 512 : 1024;
  plan.shared_rounds = static_cast<int>(std::min((packs + plan.threads - 1) / plan.threads, room / plan.threads));
  with_element(dtype, [&](auto element) {
    // All that a block may have, since plans of other vocabularies share the kernel.
    const void* kernel = reinterpret_cast<const void*>(kernel_of<decltype(element)>(plan));
    QUERN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    train ? static_cast<int>(room * 16) : 0));
  });
  return plan;
}

void cross_entropy(const CrossEntropy& plan, void* logits, std::uint8_t* codes, const std::int32_t* targets,
                   float* losses, std::int64_t rows, cudaStream_t stream) {
  if (rows == 0) return;
  const Arguments arguments{.logits = logits,
                            .codes = codes,
                            .targets = targets,
                            .losses = losses,
                            .vocabulary = plan.vocabulary,
                            .stride = plan.stride,
                            .shared_rounds = plan.shared_rounds,
                            .z_loss = plan.z_loss,
                            .seed = plan.seed,
                            .cap = plan.cap,
                            .code_format = plan.gradient_format,
                            .code_inverse = 1.0f / plan.gradient_scale};
  with_element(plan.dtype, [&](auto element) {
    kernel_of<decltype(element)>(plan)<<<static_cast<unsigned>(rows), plan.threads, shared_size(plan), stream>>>(
        arguments);
  });
  QUERN_CUDA(cudaGetLastError());
}

void add_loss_stats(const float* losses, const std::int32_t* targets, const float* correct, std::int64_t count,
                    double* stats, const LossTerm& term, bool add, cudaStream_t stream) {
  loss_stats_kernel<<<1, 1024, 0, stream>>>(losses, targets, correct, count, stats, term, add);
  QUERN_CUDA(cudaGetLastError());
}

void loss_stats_gradient(const std::int32_t* targets, std::int64_t count, float factor, float* gradient,
                         cudaStream_t stream) {
  if (count == 0) return;
  loss_stats_gradient_kernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(targets, count, factor,
                                                                                             gradient);
  QUERN_CUDA(cudaGetLastError());
}

}  // namespace quern::cuda
