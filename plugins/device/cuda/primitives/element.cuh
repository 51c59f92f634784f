#pragma once
// The element types that kernels are instantiated for, and the one place that turns a runtime DType into one of them.

#include <cuda_bf16.h>

#include <string>
#include <utility>

#include "quern/dtype.h"
#include "quern/error.h"

namespace quern::cuda {

using bf16 = __nv_bfloat16;

/// Calls f(T{}) with T float or bf16.
template <class F>
decltype(auto) with_element(DType type, F&& f) {
  if (type == DType::f32) return std::forward<F>(f)(float{});
  if (type == DType::bf16) return std::forward<F>(f)(bf16{});
  fail_internal("device cuda", "a kernel for " + std::string(name_of(type)) + " was asked for and not refused");
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
/// x rounded to T, to nearest even.
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}

}  // namespace quern::cuda
