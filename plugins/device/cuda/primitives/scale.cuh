#pragma once
// How a quantizing kernel gets its scale (quern/step_state.h, ScaleState). Blocks reduce the amax of
// their values; the last one to finish decides whether the scale that was assumed holds; a second launch, which
// returns at once otherwise, does the work again with the amax just measured. Only integers are combined by atomics, so
// results do not depend on the order of blocks.

#include <cuda_fp8.h>

#include <cstdint>

#include "primitives/philox.cuh"
#include "primitives/vector.cuh"
#include "quern/dtype.h"
#include "quern/step_state.h"

namespace quern::cuda {

/// As largest_of and format_scale of quern/numeric.h.
__device__ __forceinline__ float largest_code(DType format) {
  return format == DType::e4m3 ? 448.0f : format == DType::e5m2 ? 57344.0f : 127.0f;
}
__device__ __forceinline__ float format_scale(float amax, DType format) {
  const std::uint32_t bits = __float_as_uint(amax);
  if (bits >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  if (bits == 0) return 1.0f;
  if (format == DType::i8) return fmaxf(__fdiv_rn(amax, 127.0f), 0x1p-126f);
  // largest is 1.75 * 2^8 or 1.75 * 2^15; amax = mantissa * 2^exponent, mantissa in [1, 2), a subnormal below the
  // range.
  int exponent = static_cast<int>(bits >> 23) - 127 - (format == DType::e4m3 ? 8 : 15);
  if ((bits & 0x7fffffu) > 0x600000u) ++exponent;
  exponent = exponent < -126 ? -126 : exponent;
  return __uint_as_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

/// 1 / scale of a scale that format_scale made for e4m3 or e5m2: a power of two far from the largest, or NaN.
__device__ __forceinline__ float inverse_power(float scale) {
  const std::uint32_t bits = __float_as_uint(scale);
  return bits > 0x7f000000u ? scale : __uint_as_float(0x7f000000u - bits);
}

/// Whether a NaN has to make the amax infinite, and with that the scale NaN: in i8, which has no value for NaN. In
/// other formats it takes no part in the amax.
template <int kCount>
__device__ __forceinline__ bool loses_nan(const float (&values)[kCount], DType format) {
  bool found = false;
  if (format == DType::i8) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) found |= isnan(values[i]);
  }
  return found;
}

/// Which launch of an op this is.
enum class Pass : std::uint8_t {
  given,  ///< the only one: the scale is known
  first,  ///< measures, and writes with the state's scale when there is one
  again,  ///< writes with the scale that `first` found when it could not keep the state's
};

struct QuantizeArguments {
  std::uint8_t *q, *t;  ///< (N, C), (C, N); null: not wanted
  ScaleState* state;    ///< passes first and again
  const float* given;   ///< pass given
  float* scale;         ///< where `first` leaves the scale; may be null
  float margin;         ///< factor on scales made from an amax, a power of two
  DType format;
  Pass pass;
};

/// kCount values quantized in e4m3 or e5m2, four a word, in order. `inverse`, of the scale, is a power of two: exact.
template <int kCount>
__device__ __forceinline__ void encode_float8(const float (&values)[kCount], DType format, float inverse,
                                              std::uint32_t (&words)[kCount / 4]) {
  auto encode = [&](__nv_fp8_interpretation_t to) {
#pragma unroll
    for (int w = 0; w < kCount / 4; ++w) {
      const float* v = values + 4 * w;
      const float2 low = make_float2(v[0] * inverse, v[1] * inverse),
                   high = make_float2(v[2] * inverse, v[3] * inverse);
      words[w] = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, to) |
                 static_cast<std::uint32_t>(__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, to)) << 16;
    }
  };
  format == DType::e4m3 ? encode(__NV_E4M3) : encode(__NV_E5M2);
}

/// What a kernel can write: code for i8 is long, and slows those that never come to it.
enum class Formats : std::uint8_t { float8, any };

/// Bytes of two integers from -128 to 127, values outside brought to the nearer end, below `above`'s bytes.
__device__ __forceinline__ std::uint32_t pack_i8(int low, int high, std::uint32_t above) {
  std::uint32_t word;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(high), "r"(low), "r"(above));
  return word;
}

/// In any format of 8 bits.
template <int kCount>
__device__ __forceinline__ void encode_codes(const float (&values)[kCount], DType format, float inverse,
                                             std::uint32_t (&words)[kCount / 4]) {
  if (format != DType::i8) return encode_float8(values, format, inverse, words);
  auto code = [&](int i) { return max(__float2int_rn(values[i] * inverse), -127); };  // of a NaN: 0
#pragma unroll
  for (int w = 0; w < kCount / 4; ++w)
    words[w] = pack_i8(code(4 * w), code(4 * w + 1), pack_i8(code(4 * w + 2), code(4 * w + 3), 0));
}

/// Values of consecutive places in a line, the first of which is `place`, as the integers that a code rounds to
/// stochastically: encode_codes with an `inverse` of 1 writes them.
template <int kCount>
__device__ __forceinline__ void draw_integers(float (&values)[kCount], float inverse, int place) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    values[i] = stochastic_integer(values[i], inverse, static_cast<std::uint32_t>(place + i));
}

/// The part that one thread has in quantizing a tensor. All threads of all blocks construct it, give it what they see
/// and, unless it is idle, call `finish` together.
template <Formats kFormats>
class Quantizer {
 public:
  __device__ __forceinline__ explicit Quantizer(const QuantizeArguments& args) {
    if (args.pass == Pass::given) {
      scale_ = *args.given;
      writes_ = true;
    } else {
      const volatile ScaleState* state = args.state;
      scale_ = state->scale;
      writes_ = scale_ > 0;
      if (args.pass == Pass::again) {
        idle_ = state->redo == 0;
        if (!writes_) scale_ = 1.0f;
        if (state->amax_now >= 0x7f800000u) scale_ = __uint_as_float(0x7fc00000u);
        writes_ = true;
      }
    }
    inverse_ = __fdiv_rn(1.0f, scale_);
  }

  /// Nothing to do: the same for all threads.
  __device__ __forceinline__ bool idle() const { return idle_; }
  /// Whether this launch quantizes.
  __device__ __forceinline__ bool writes() const { return writes_; }
  /// 1 / scale.
  __device__ __forceinline__ float inverse() const { return inverse_; }

  template <int kCount>
  __device__ __forceinline__ void measure(const QuantizeArguments& args, const float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) amax_ = fmaxf(amax_, fabsf(values[i]));
    if constexpr (kFormats == Formats::any)
      if (loses_nan(values, args.format)) amax_ = __uint_as_float(0x7f800000u);
  }

  /// Values past the end of a row are to be zero.
  template <int kCount>
  __device__ __forceinline__ void encode(const QuantizeArguments& args, const float (&values)[kCount],
                                         std::uint32_t (&words)[kCount / 4]) {
    if constexpr (kFormats == Formats::float8)
      encode_float8(values, args.format, inverse_, words);
    else
      encode_codes(values, args.format, inverse_, words);
  }

  /// Hands over what the block saw; the last block of the launch decides.
  __device__ __forceinline__ void finish(const QuantizeArguments& args) {
    if (args.pass == Pass::given) return;
    finish(args, static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x), [] { __syncthreads(); });
  }
  /// The same where the first so many threads of the block are all that saw something, `thread` is one of them, and
  /// synchronize() waits for them.
  template <class Synchronize>
  __device__ __forceinline__ void finish(const QuantizeArguments& args, int thread, Synchronize synchronize) {
    __shared__ unsigned block_amax;
    if (thread == 0) block_amax = 0;
    synchronize();
    const unsigned amax = __reduce_max_sync(~0u, __float_as_uint(amax_));
    if (thread % 32 == 0) atomicMax(&block_amax, amax);
    synchronize();
    if (thread != 0) return;
    if (args.pass == Pass::first && block_amax > 0) atomicMax(&args.state->amax_now, block_amax);
    __threadfence();
    if (atomicAdd(&args.state->ticket, 1u) + 1 != gridDim.x) return;
    __threadfence();
    if (args.pass == Pass::first)
      decide(args);
    else
      close(args);
  }

 private:
  /// One thread, when all blocks of `first` are done.
  __device__ void decide(const QuantizeArguments& args) const {
    ScaleState& state = *args.state;
    const float amax = __uint_as_float(atomicMax(&state.amax_now, 0u)), assumed = state.scale;
    const bool finite = __float_as_uint(amax) < 0x7f800000u,
               clipped = finite && amax > assumed * largest_code(args.format);
    state.assumed = assumed;
    float scale = assumed > 0 ? assumed : 1.0f;
    if (clipped) {
      scale = format_scale(amax, args.format) * args.margin;
      state.scale = scale;
      state.redone += 1;
    }
    if (finite) state.amax = fmaxf(state.amax, amax);
    if (args.scale != nullptr) *args.scale = finite ? scale : __uint_as_float(0x7fc00000u);
    const bool redo = clipped || !finite || !(assumed > 0);
    state.redo = redo;
    state.ticket = 0;
    if (!redo) state.amax_now = 0;
  }

  /// One thread, when all blocks of `again` are done.
  __device__ static void close(const QuantizeArguments& args) {
    ScaleState& state = *args.state;
    state.redo = state.ticket = state.amax_now = 0;
  }

  float scale_ = 1, inverse_ = 1, amax_ = 0;
  bool idle_ = false, writes_ = false;
};

}  // namespace quern::cuda
