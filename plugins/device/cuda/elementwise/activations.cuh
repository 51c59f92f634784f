#pragma once
// The activations' arithmetic, in fp32. Multiplications are not contracted into fused multiply-adds unless written so:
// fused kernels and the ops that they replace then give the same bits.

#include <cuda_runtime.h>

namespace quern::cuda {

/// 1 / x within 1 ulp; zero for infinite x.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 2^x within 2^-22 of itself, above the smallest normal number; below zero.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Where e^-x is far from 1 the rounding of x log2(e) costs up to 4e-6 of it.
__device__ __forceinline__ float sigmoid(float x) { return fast_reciprocal(1.0f + fast_exp2(-1.44269504f * x)); }

// ---- SwiGLU: Shazeer, "GLU Variants Improve Transformer" (2020) ----

__device__ __forceinline__ float swiglu(float gate, float up) { return gate * sigmoid(gate) * up; }

struct GateUp {
  float gate, up;
};
/// d silu(g) / dg = sigmoid(g) + silu(g) * (1 - sigmoid(g))
__device__ __forceinline__ GateUp swiglu_grad(float dy, float gate, float up) {
  const float s = sigmoid(gate), silu = gate * s;
  return {dy * up * (fmaf(-s, silu, silu) + s), dy * silu};
}

// ---- GELU: Hendrycks & Gimpel, "Gaussian Error Linear Units" (2016) ----

inline constexpr float kTanhScale = 1.5957691216f;  // 2 sqrt(2 / pi): (1 + tanh(u)) / 2 = sigmoid(2 u)
inline constexpr float kTanhCubic = 0.044715f;

struct GeluErf {
  __device__ __forceinline__ float operator()(float x) const { return x * normcdff(x); }
};
struct GeluTanh {
  __device__ __forceinline__ float operator()(float x) const {
    return x * sigmoid(kTanhScale * fmaf(kTanhCubic * x * x, x, x));
  }
};
struct GeluErfGrad {
  __device__ __forceinline__ float operator()(float dy, float x) const {
    const float density = 0.39894228f * expf(-0.5f * x * x);
    return dy * fmaf(x, density, normcdff(x));
  }
};
struct GeluTanhGrad {
  __device__ __forceinline__ float operator()(float dy, float x) const {
    const float s = sigmoid(kTanhScale * fmaf(kTanhCubic * x * x, x, x));
    const float slope = kTanhScale * fmaf(3.0f * kTanhCubic * x, x, 1.0f);
    return dy * fmaf(x * s * (1.0f - s), slope, s);
  }
};
struct Add {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

}  // namespace quern::cuda
