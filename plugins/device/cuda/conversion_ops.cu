// transpose, cast and quantize: ops that move or round values and do no arithmetic on them.

#include <cuda_fp8.h>

#include <algorithm>
#include <string>

#include "check.h"
#include "element.cuh"
#include "kernels.h"
#include "quern/numeric.h"

namespace quern::cuda {

namespace {

using e4m3 = __nv_fp8_e4m3;
using e5m2 = __nv_fp8_e5m2;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(e4m3 x) { return static_cast<float>(x); }
__device__ __forceinline__ float widen(e5m2 x) { return static_cast<float>(x); }
__device__ __forceinline__ float widen(std::int8_t x) { return static_cast<float>(x); }

/// Rounds to nearest even; 8-bit formats saturate. As numeric.h defines it.
template <class T>
__device__ __forceinline__ T narrow(float x) {
  return T(x);  // the 8-bit floats saturate finite values
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ std::int8_t narrow<std::int8_t>(float x) {
  return isnan(x) ? std::int8_t{0} : static_cast<std::int8_t>(rintf(fminf(fmaxf(x, -127.0f), 127.0f)));
}

/// Eight elements, moved by loads of up to 16 bytes.
template <class T>
struct alignas(sizeof(T) >= 2 ? 16 : 8) Eight {
  T at[8];
};

template <class... T>
bool aligned(const T*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % alignof(Eight<T>) == 0) && ...);
}

unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((threads + 255) / 256, 1, 1 << 16));
}

/// Calls f(T{}) for any of the real formats.
template <class F>
void with_format(DType type, F&& f) {
  switch (type) {
    case DType::e4m3: return f(e4m3{});
    case DType::e5m2: return f(e5m2{});
    case DType::i8: return f(std::int8_t{});
    default: return with_element(type, f);
  }
}

bool is_format(DType type) {
  return type == DType::f32 || type == DType::bf16 || type == DType::e4m3 || type == DType::e5m2 || type == DType::i8;
}

// ---- transpose ----

constexpr int kTile = 64;

/// (rows, columns) -> (columns, rows), a tile a block of (kTile, 4) threads.
template <class T>
__global__ void transpose_kernel(const T* __restrict__ x, T* __restrict__ y, std::int64_t rows, std::int64_t columns) {
  __shared__ T tile[kTile][kTile + 4 / sizeof(T) + (sizeof(T) > 4)];
  const std::int64_t tiles_across = (columns + kTile - 1) / kTile, tiles = (rows + kTile - 1) / kTile * tiles_across;
  for (std::int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const std::int64_t row = t / tiles_across * kTile, column = t % tiles_across * kTile;
    for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
      if (row + i < rows && column + threadIdx.x < columns)
        tile[i][threadIdx.x] = x[(row + i) * columns + column + threadIdx.x];
    }
    __syncthreads();
    for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
      if (column + i < columns && row + threadIdx.x < rows)
        y[(column + i) * rows + row + threadIdx.x] = tile[threadIdx.x][i];
    }
    __syncthreads();
  }
}

template <class T>
void transpose_elements(const View& x, const View& y, cudaStream_t stream) {
  const std::int64_t rows = x.extents[0], columns = x.extents[1];
  const std::int64_t tiles = ((rows + kTile - 1) / kTile) * ((columns + kTile - 1) / kTile);
  if (tiles == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(tiles, 1 << 16));
  transpose_kernel<<<blocks, dim3(kTile, 4), 0, stream>>>(x.as<const T>(), y.as<T>(), rows, columns);
  QUERN_CUDA(cudaGetLastError());
}

void transpose(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
  const View &x = inputs[0], &y = outputs[0];
  cudaStream_t stream = stream_of(exec);
  switch (size_of(x.dtype)) {
    case 1: return transpose_elements<std::uint8_t>(x, y, stream);
    case 2: return transpose_elements<std::uint16_t>(x, y, stream);
    case 4: return transpose_elements<std::uint32_t>(x, y, stream);
    default: return transpose_elements<std::uint64_t>(x, y, stream);
  }
}

OpSupport query_transpose(const OpInstance& op, const CudaTraits&) {
  if (op.inputs.size() != 1 || op.outputs.size() != 1) return {"transpose: takes x, gives t", 0};
  const Operand &x = op.inputs[0], &y = op.outputs[0];
  if (x.extents.size() != 2 || y.extents != Extents{x.extents[1], x.extents[0]} || x.dtype != y.dtype)
    return {"transpose: (R, C) gives (C, R) of the same dtype", 0};
  if (y.accumulate) return {"transpose: output 0 cannot accumulate", 0};
  return {};
}

// ---- cast ----

template <class From, class To>
__global__ void cast_kernel(const From* __restrict__ x, To* __restrict__ y, std::int64_t count, std::int64_t eights) {
  const std::int64_t thread = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = thread; i < eights; i += threads) {
    Eight<From> from = reinterpret_cast<const Eight<From>*>(x)[i];
    Eight<To> to;
#pragma unroll
    for (int j = 0; j < 8; ++j) to.at[j] = narrow<To>(widen(from.at[j]));
    reinterpret_cast<Eight<To>*>(y)[i] = to;
  }
  for (std::int64_t i = 8 * eights + thread; i < count; i += threads) y[i] = narrow<To>(widen(x[i]));
}

void cast(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
  const View &x = inputs[0], &y = outputs[0];
  const std::int64_t count = x.count();
  if (count == 0) return;
  with_format(x.dtype, [&](auto from) {
    with_format(y.dtype, [&](auto to) {
      const auto* source = x.as<const decltype(from)>();
      auto* target = y.as<decltype(to)>();
      const std::int64_t eights = aligned(source, target) ? count / 8 : 0;
      cast_kernel<<<blocks_for(eights > 0 ? eights : count), 256, 0, stream_of(exec)>>>(source, target, count, eights);
    });
  });
  QUERN_CUDA(cudaGetLastError());
}

OpSupport query_cast(const OpInstance& op, const CudaTraits&) {
  if (op.inputs.size() != 1 || op.outputs.size() != 1) return {"cast: takes x, gives y", 0};
  const Operand &x = op.inputs[0], &y = op.outputs[0];
  if (!is_format(x.dtype) || !is_format(y.dtype))
    return {"cast: no cast from " + std::string(name_of(x.dtype)) + " to " + std::string(name_of(y.dtype)), 0};
  if (element_count(x.extents) != element_count(y.extents)) return {"cast: sizes differ", 0};
  if (y.accumulate) return {"cast: output 0 cannot accumulate", 0};
  return {};
}

// ---- quantize ----

/// Largest magnitude as the bits of a float: those of non-negative floats order as integers, so atomics are exact. A
/// NaN does not take part.
template <class T>
__global__ void amax_kernel(const T* __restrict__ x, std::int64_t count, std::int64_t eights, unsigned* amax_bits) {
  const std::int64_t thread = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  float amax = 0;
  for (std::int64_t i = thread; i < eights; i += threads) {
    Eight<T> values = reinterpret_cast<const Eight<T>*>(x)[i];
#pragma unroll
    for (int j = 0; j < 8; ++j) amax = fmaxf(amax, fabsf(widen(values.at[j])));
  }
  for (std::int64_t i = 8 * eights + thread; i < count; i += threads) amax = fmaxf(amax, fabsf(widen(x[i])));
  for (int offset = 16; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
  if (threadIdx.x % 32 == 0 && amax > 0) atomicMax(amax_bits, __float_as_uint(amax));
}

template <class T, class Q>
__global__ void quantize_kernel(const T* __restrict__ x, Q* __restrict__ q, float* __restrict__ scale_out,
                                std::int64_t count, std::int64_t eights, const unsigned* __restrict__ amax_bits,
                                float largest) {
  const std::int64_t thread = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  float scale = __fdiv_rn(__uint_as_float(*amax_bits), largest);
  if (scale == 0) scale = 1.0f;  // amax is zero, or so small that the quotient underflows
  if (thread == 0) *scale_out = scale;
  for (std::int64_t i = thread; i < eights; i += threads) {
    Eight<T> values = reinterpret_cast<const Eight<T>*>(x)[i];
    Eight<Q> codes;
#pragma unroll
    for (int j = 0; j < 8; ++j) codes.at[j] = narrow<Q>(__fdiv_rn(widen(values.at[j]), scale));
    reinterpret_cast<Eight<Q>*>(q)[i] = codes;
  }
  for (std::int64_t i = 8 * eights + thread; i < count; i += threads) q[i] = narrow<Q>(__fdiv_rn(widen(x[i]), scale));
}

void quantize(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
  const View &x = inputs[0], &q = outputs[0];
  const std::int64_t count = x.count();
  cudaStream_t stream = stream_of(exec);
  auto* amax_bits = static_cast<unsigned*>(exec.workspace);
  QUERN_CUDA(cudaMemsetAsync(amax_bits, 0, sizeof(unsigned), stream));
  with_element(x.dtype, [&](auto wide) {
    with_format(q.dtype, [&](auto code) {
      const auto* source = x.as<const decltype(wide)>();
      auto* target = q.as<decltype(code)>();
      const std::int64_t eights = aligned(source, target) ? count / 8 : 0;
      const unsigned blocks = std::min(blocks_for(eights > 0 ? eights : count), 4096u);
      amax_kernel<<<blocks, 256, 0, stream>>>(source, count, eights, amax_bits);
      QUERN_CUDA(cudaGetLastError());
      quantize_kernel<<<blocks, 256, 0, stream>>>(source, target, outputs[1].as<float>(), count, eights, amax_bits,
                                                  largest_of(q.dtype));
    });
  });
  QUERN_CUDA(cudaGetLastError());
}

OpSupport query_quantize(const OpInstance& op, const CudaTraits&) {
  if (op.inputs.size() != 1 || op.outputs.size() != 2) return {"quantize: takes x, gives q and its scale", 0};
  const Operand &x = op.inputs[0], &q = op.outputs[0], &scale = op.outputs[1];
  if (x.dtype != DType::f32 && x.dtype != DType::bf16) return {"quantize: x must be f32 or bf16", 0};
  if (!is_format(q.dtype) || size_of(q.dtype) != 1)
    return {"quantize: q must be e4m3, e5m2 or i8, not " + std::string(name_of(q.dtype)), 0};
  if (element_count(x.extents) != element_count(q.extents)) return {"quantize: x and q must have the same size", 0};
  if (scale.dtype != DType::f32 || scale.extents != Extents{1} || !scale.present)
    return {"quantize: scale must be f32 (1)", 0};
  if (q.accumulate || scale.accumulate) return {"quantize: outputs cannot accumulate", 0};
  return {{}, 256};
}

CudaOp op(void (*run)(std::span<const View>, std::span<const View>, const Exec&),
          OpSupport (*query)(const OpInstance&, const CudaTraits&)) {
  return {[run](const OpInstance&, CudaContext&) { return Launch(run); }, query};
}

}  // namespace

void add_conversion_ops(OpTable& table) {
  table["transpose"] = op(transpose, query_transpose);
  table["cast"] = op(cast, query_cast);
  table["quantize"] = op(quantize, query_quantize);
}

}  // namespace quern::cuda
