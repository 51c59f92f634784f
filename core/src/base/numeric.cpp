#include "quern/numeric.h"

#include <algorithm>
#include <limits>

#include <cmath>
#include <string>

#include "quern/error.h"
#include "quern/quantized_format.h"

namespace quern {

namespace {

// An 8-bit float with `mantissa` bits and exponent bias `bias`; saturating. The magnitude is scaled so that the grid
// spacing becomes 1 and rounded to an integer there, which handles normal and subnormal numbers alike.
template <int kMantissa, int kBias>
std::uint8_t encode(float value, float largest, std::uint8_t nan_bits) {
  if (std::isnan(value)) return nan_bits;
  std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  float magnitude = std::fabs(value);
  if (magnitude > largest) magnitude = largest;
  constexpr int kLowestExponent = 1 - kBias;
  int exponent = magnitude > 0 ? std::ilogb(magnitude) : kLowestExponent;
  if (exponent < kLowestExponent) exponent = kLowestExponent;
  int grid = static_cast<int>(std::nearbyint(std::ldexp(magnitude, kMantissa - exponent)));
  // `grid` counts steps of 2^(exponent - mantissa): consecutive values, so a carry into the next exponent is exact.
  int code = grid + ((exponent - kLowestExponent) << kMantissa);
  return static_cast<std::uint8_t>(sign | code);
}

template <int kMantissa, int kBias>
float decode(std::uint8_t bits) {
  int code = bits & 0x7f;
  int exponent = code >> kMantissa;
  int fraction = code & ((1 << kMantissa) - 1);
  float magnitude = exponent == 0
                        ? std::ldexp(static_cast<float>(fraction), 1 - kBias - kMantissa)
                        : std::ldexp(static_cast<float>(fraction | (1 << kMantissa)), exponent - kBias - kMantissa);
  return bits & 0x80 ? -magnitude : magnitude;
}

}  // namespace

float e4m3_to_float(std::uint8_t bits) { return (bits & 0x7f) == 0x7f ? std::nanf("") : decode<3, 7>(bits); }

std::uint8_t float_to_e4m3(float value) { return encode<3, 7>(value, 448.0f, 0x7f); }

float e5m2_to_float(std::uint8_t bits) {
  int code = bits & 0x7f;
  if (code > 0x7c) return std::nanf("");
  if (code == 0x7c) return bits & 0x80 ? -INFINITY : INFINITY;
  return decode<2, 15>(bits);
}

std::uint8_t float_to_e5m2(float value) { return encode<2, 15>(value, 57344.0f, 0x7f); }

float format_scale(float amax, DType format) { return format_scale(amax, {{}, format, largest_of(format)}); }

float format_scale(float amax, const QuantizedFormat& format) {
  if (!std::isfinite(amax)) return std::numeric_limits<float>::quiet_NaN();
  if (amax == 0) return 1.0f;
  if (format.dtype == DType::i8) return std::max(amax / format.largest, 0x1p-126f);  // 1 / scale is finite
  int exponent = 0;
  float mantissa = std::frexp(amax, &exponent);  // amax = mantissa * 2^exponent, mantissa in [0.5, 1)
  // largest_of(e4m3) = 0.875 * 2^9 and largest_of(e5m2) = 0.875 * 2^16.
  exponent -= format.dtype == DType::e4m3 ? 9 : 16;
  if (mantissa > 0.875f) ++exponent;
  return std::ldexp(1.0f, std::clamp(exponent, -126, 126));
}

std::int8_t float_to_i8(float value) {
  if (std::isnan(value)) return 0;
  float clamped = value < -127.0f ? -127.0f : value > 127.0f ? 127.0f : value;
  return static_cast<std::int8_t>(std::nearbyint(clamped));
}

float round_to(DType type, float value) {
  switch (type) {
    case DType::f64:
    case DType::f32: return value;
    case DType::bf16: return bf16_to_float(float_to_bf16(value));
    case DType::e4m3: return e4m3_to_float(float_to_e4m3(value));
    case DType::e5m2: return e5m2_to_float(float_to_e5m2(value));
    case DType::i8: return static_cast<float>(float_to_i8(value));
    default: fail_internal("round_to", "not a real format: " + std::string(name_of(type)));
  }
}

}  // namespace quern
