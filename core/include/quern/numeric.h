#pragma once
// The exact meaning of every low-precision format: conversions between fp32 and bf16, e4m3, e5m2 and int8 bits.
// These functions are the definition that kernels on all devices are tested against. Rounding is to nearest, ties
// to even, unless a function says stochastic. e4m3 is OCP E4M3 ("fn": no infinities, largest 448); e5m2 is OCP E5M2
// (largest finite 57344). Conversion to fp8 and int8 saturates; NaN stays NaN (int8: becomes 0).

#include <bit>
#include <cmath>
#include <cstdint>

#include "quern/dtype.h"

namespace quern {

/// Largest finite magnitude of a format.
constexpr float largest_of(DType type) {
  switch (type) {
    case DType::e4m3: return 448.0f;
    case DType::e5m2: return 57344.0f;
    case DType::i8: return 127.0f;
    case DType::bf16: return 3.38953139e38f;
    default: return 3.402823466e38f;
  }
}

inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

inline std::uint16_t float_to_bf16(float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}

/// Rounds to bf16 up or down with probability given by the 16 low bits of `random`: unbiased for finite values.
inline std::uint16_t float_to_bf16_stochastic(float value, std::uint32_t random) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  bool special = (bits & 0x7f800000u) == 0x7f800000u;
  return special ? float_to_bf16(value) : static_cast<std::uint16_t>((bits + (random & 0xffffu)) >> 16);
}

/// The integer below or above `value`: above with a probability equal to the distance from the one below, by the upper
/// 24 bits of `random`. Integers and NaN are unchanged.
inline float to_integer_stochastic(float value, std::uint32_t random) {
  const float below = std::floor(value);
  return static_cast<float>(random >> 8) < (value - below) * 0x1p24f ? below + 1.0f : below;
}

/// The scale of a tensor, or row, whose largest magnitude is `amax`, for an 8-bit `format`: x is about q * scale.
/// e4m3 and e5m2: the smallest power of two with amax <= scale * largest_of(format), within [2^-126, 2^126], so that
/// multiplying by 1 / scale is exact and every device agrees. i8: amax / 127, at least 2^-126, so that 1 / scale is
/// finite. Zero gives 1; infinity and NaN give NaN.
float format_scale(float amax, DType format);

/// The fixed scale of the gradients of logits, in an 8-bit format: |softmax - onehot| <= 1, and z_loss multiplies the
/// softmax by up to 1 + 2 z_loss logsumexp; the scale covers logsumexps up to 32.
inline float logit_gradient_scale(float seed, float z_loss, DType format) {
  return format_scale(seed * (1.0f + 64.0f * z_loss), format);
}

float e4m3_to_float(std::uint8_t bits);
std::uint8_t float_to_e4m3(float value);
float e5m2_to_float(std::uint8_t bits);
std::uint8_t float_to_e5m2(float value);
std::int8_t float_to_i8(float value);

/// `value` rounded to the grid of `type` (f64 and f32: unchanged). Integer types other than i8 are refused.
float round_to(DType type, float value);

}  // namespace quern
