// cast: rounds values from one format to another, bytes also after a factor and a summand of their channel.

#include <cuda_fp8.h>

#include <algorithm>
#include <string>

#include "primitives/element.cuh"
#include "quantization/transpose.h"
#include "runtime/check.h"
#include "runtime/kernels.h"

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

/// x of bytes, `group` rows of which share a row of scale: factors of the channels, each of `part` columns, and
/// summands. A block for a row.
template <class To>
__global__ void cast_scaled_kernel(const std::uint8_t* __restrict__ x, const float* __restrict__ scale,
                                   To* __restrict__ y, std::int64_t rows, int columns, std::int64_t group,
                                   int channels) {
  const int part = columns / channels;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float* factors = scale + row / group * 2 * channels;
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
      y[row * columns + i] = narrow<To>(__fadd_rn(
          __fmul_rn(static_cast<float>(x[row * columns + i]), factors[i / part]), factors[channels + i / part]));
  }
}

void cast_scaled(const View& x, const View& scale, const View& y, const Exec& exec) {
  const std::int64_t rows = x.rows();
  with_format(y.dtype, [&](auto to) {
    cast_scaled_kernel<<<static_cast<unsigned>(std::min<std::int64_t>(rows, 1 << 16)), 256, 0, stream_of(exec)>>>(
        x.as<std::uint8_t>(), scale.as<float>(), y.as<decltype(to)>(), rows, static_cast<int>(x.columns()),
        rows / scale.rows(), static_cast<int>(scale.columns() / 2));
  });
  QUERN_CUDA(cudaGetLastError());
}

void cast(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
  const View &x = inputs[0], &y = outputs[0];
  const std::int64_t count = x.count();
  if (count == 0) return;
  if (inputs.size() > 1 && inputs[1]) return cast_scaled(x, inputs[1], y, exec);
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
  if (op.inputs.empty() || op.inputs.size() > 2 || op.outputs.size() != 1)
    return {"cast: takes x and a scale, gives y", 0};
  const Operand &x = op.inputs[0], &y = op.outputs[0];
  const bool scaled = op.inputs.size() == 2 && op.inputs[1].present;
  if (scaled) {
    const Extents &scale = op.inputs[1].extents, &of = x.extents;
    if (x.dtype != DType::u8 || op.inputs[1].dtype != DType::f32 || of.size() != 2 || scale.size() != 2 ||
        scale[0] < 1 || of[0] % scale[0] != 0 || scale[1] < 2 || scale[1] % 2 != 0 || of[1] % (scale[1] / 2) != 0)
      return {"cast: a scale in f32 of bytes, " + to_string(scale) + " of " + to_string(of), 0};
  }
  if ((!scaled && !is_format(x.dtype)) || !is_format(y.dtype))
    return {"cast: no cast from " + std::string(name_of(x.dtype)) + " to " + std::string(name_of(y.dtype)), 0};
  if (element_count(x.extents) != element_count(y.extents)) return {"cast: sizes differ", 0};
  if (y.accumulate) return {"cast: output 0 cannot accumulate", 0};
  return {};
}

CudaOp op(void (*run)(std::span<const View>, std::span<const View>, const Exec&),
          OpSupport (*query)(const OpInstance&, const CudaTraits&)) {
  return {[run](const OpInstance&, CudaContext&) { return Launch(run); }, query};
}

}  // namespace

void add_conversion_ops(OpTable& table) {
  add_transpose_op(table);
  table["cast"] = op(cast, query_cast);
}

}  // namespace quern::cuda
