#include "primitives/rows.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "primitives/simd.h"
#include "quern/error.h"
#include "quern/numeric.h"

namespace quern::cpu {

namespace {

// The scalar functions of numeric.h define the formats; these give the same bits (rows_test.cpp compares them over
// all bit patterns) in branch-free integer arithmetic, which the compiler vectorises.

QUERN_CPU_CLONES void decode_bf16(const std::uint16_t* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = __builtin_bit_cast(float, std::uint32_t{from[i]} << 16);
}

QUERN_CPU_CLONES void encode_bf16(const float* from, std::int64_t count, std::uint16_t* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t bits = __builtin_bit_cast(std::uint32_t, from[i]);
    std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    std::uint32_t quiet = (bits >> 16) | 0x40u;
    to[i] = static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
}

QUERN_CPU_CLONES void round_bf16(float* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t bits = __builtin_bit_cast(std::uint32_t, values[i]);
    std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    std::uint32_t quiet = (bits & 0xffff0000u) | 0x400000u;
    values[i] = __builtin_bit_cast(float, (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
}

QUERN_CPU_CLONES void add_bf16(const float* from, std::int64_t count, std::uint16_t* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    float sum = __builtin_bit_cast(float, std::uint32_t{to[i]} << 16) + from[i];
    std::uint32_t bits = __builtin_bit_cast(std::uint32_t, sum);
    std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    std::uint32_t quiet = (bits >> 16) | 0x40u;
    to[i] = static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
}

QUERN_CPU_CLONES void add_f32(const float* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] += from[i];
}

/// a where the condition holds, else b, by masks: a branch would keep the loop from vectorising.
[[gnu::always_inline]] inline std::uint32_t select(bool condition, std::uint32_t a, std::uint32_t b) {
  std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

/// An 8-bit float: `kMantissa` fraction bits, exponent bias `kBias`; bit patterns from kFirstSpecial up are not finite.
template <int kMantissa, int kBias, std::uint32_t kFirstSpecial>
[[gnu::always_inline]] inline float decode_float8(std::uint32_t code) {
  std::uint32_t magnitude = code & 0x7fu;
  std::uint32_t normal = (magnitude << (23 - kMantissa)) + (std::uint32_t{127 - kBias} << 23);
  // Subnormal: an integer times the smallest step, 2^(1 - bias - mantissa).
  float step = __builtin_bit_cast(float, std::uint32_t{127 + 1 - kBias - kMantissa} << 23);
  float steps = static_cast<float>(static_cast<std::int32_t>(magnitude));
  std::uint32_t subnormal = __builtin_bit_cast(std::uint32_t, steps * step);
  std::uint32_t bits = select(magnitude < (1u << kMantissa), subnormal, normal);
  std::uint32_t special = select(magnitude == 0x7cu, 0x7f800000u, 0x7fc00000u);
  bits = select(magnitude >= kFirstSpecial, special, bits);
  return __builtin_bit_cast(float, bits | (code & 0x80u) << 24);
}

/// Nearest, ties to even, saturating at the code `kLargest`; NaN becomes 0x7f.
template <int kMantissa, int kBias, std::uint32_t kLargest>
[[gnu::always_inline]] inline std::uint32_t encode_float8(float value) {
  std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  std::uint32_t magnitude = bits & 0x7fffffffu;
  constexpr int kShift = 23 - kMantissa;
  std::uint32_t normal =
      (magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1u) - (std::uint32_t{127 - kBias} << 23)) >>
      kShift;
  // Adding 2^23 steps leaves the rounded number of steps in the low bits.
  constexpr std::uint32_t kMagic = std::uint32_t{127 + 1 - kBias - kMantissa + 23} << 23;
  float shifted = __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, kMagic);
  std::uint32_t subnormal = __builtin_bit_cast(std::uint32_t, shifted) - kMagic;
  std::uint32_t code = select(magnitude < (std::uint32_t{127 + 1 - kBias} << 23), subnormal, normal);
  // Compared on the input, since far above the range `normal` has wrapped around.
  constexpr std::uint32_t kLargestBits = (kLargest << kShift) + (std::uint32_t{127 - kBias} << 23);
  code = select(magnitude > kLargestBits, kLargest, code) | (bits >> 31) << 7;
  return select(magnitude > 0x7f800000u, 0x7fu, code);
}

QUERN_CPU_CLONES void decode_e4m3(const std::uint8_t* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = decode_float8<3, 7, 0x7f>(from[i]);
}
QUERN_CPU_CLONES void encode_e4m3(const float* from, std::int64_t count, std::uint8_t* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<std::uint8_t>(encode_float8<3, 7, 0x7e>(from[i]));
}
QUERN_CPU_CLONES void decode_e5m2(const std::uint8_t* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = decode_float8<2, 15, 0x7c>(from[i]);
}
QUERN_CPU_CLONES void encode_e5m2(const float* from, std::int64_t count, std::uint8_t* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<std::uint8_t>(encode_float8<2, 15, 0x7b>(from[i]));
}

QUERN_CPU_CLONES void decode_i8(const std::int8_t* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}
QUERN_CPU_CLONES void encode_i8(const float* from, std::int64_t count, std::int8_t* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    float value = from[i];
    value = value < -127.0f ? -127.0f : value;
    value = value > 127.0f ? 127.0f : value;
    // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
    std::int32_t rounded = __builtin_bit_cast(std::int32_t, value + 12582912.0f) - 0x4b400000;
    to[i] = static_cast<std::int8_t>(value != value ? 0 : rounded);
  }
}

void decode(const View& view, std::int64_t begin, std::int64_t count, float* to) {
  switch (view.dtype) {
    case DType::f32: std::copy_n(view.as<float>() + begin, count, to); return;
    case DType::bf16: return decode_bf16(view.as<std::uint16_t>() + begin, count, to);
    case DType::e4m3: return decode_e4m3(view.as<std::uint8_t>() + begin, count, to);
    case DType::e5m2: return decode_e5m2(view.as<std::uint8_t>() + begin, count, to);
    case DType::i8: return decode_i8(view.as<std::int8_t>() + begin, count, to);
    case DType::f64:
      for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(view.as<double>()[begin + i]);
      return;
    default: fail_internal("cpu load", "not a real dtype: " + std::string(name_of(view.dtype)));
  }
}

void encode(const View& view, std::int64_t begin, std::int64_t count, const float* from) {
  switch (view.dtype) {
    case DType::f32: std::copy_n(from, count, view.as<float>() + begin); return;
    case DType::bf16: return encode_bf16(from, count, view.as<std::uint16_t>() + begin);
    case DType::e4m3: return encode_e4m3(from, count, view.as<std::uint8_t>() + begin);
    case DType::e5m2: return encode_e5m2(from, count, view.as<std::uint8_t>() + begin);
    case DType::i8: return encode_i8(from, count, view.as<std::int8_t>() + begin);
    case DType::f64: std::copy_n(from, count, view.as<double>() + begin); return;
    default: fail_internal("cpu store", "not a real dtype: " + std::string(name_of(view.dtype)));
  }
}

constexpr std::int64_t kBlock = 1024;  // floats of a stack buffer

}  // namespace

const float* load(const View& view, std::int64_t begin, std::int64_t count, float* scratch) {
  if (view.dtype == DType::f32) return view.as<float>() + begin;
  decode(view, begin, count, scratch);
  return scratch;
}

float* target(const View& view, std::int64_t begin, float* scratch) {
  return view.dtype == DType::f32 ? view.as<float>() + begin : scratch;
}

void store(const View& view, std::int64_t begin, std::int64_t count, const float* values) {
  if (view.dtype == DType::f32 && view.as<float>() + begin == values) return;
  encode(view, begin, count, values);
}

void accumulate(const View& view, std::int64_t begin, std::int64_t count, const float* values) {
  if (view.dtype == DType::f32) return add_f32(values, count, view.as<float>() + begin);
  if (view.dtype == DType::bf16) return add_bf16(values, count, view.as<std::uint16_t>() + begin);
  float block[kBlock];
  for (std::int64_t done = 0; done < count; done += kBlock) {
    std::int64_t part = std::min(kBlock, count - done);
    decode(view, begin + done, part, block);
    add_f32(values + done, part, block);
    encode(view, begin + done, part, block);
  }
}

void round_in_place(DType dtype, float* values, std::int64_t count) {
  if (dtype == DType::f32 || dtype == DType::f64) return;
  if (dtype == DType::bf16) return round_bf16(values, count);
  std::uint8_t codes[kBlock];
  for (std::int64_t done = 0; done < count; done += kBlock) {
    std::int64_t part = std::min(kBlock, count - done);
    View view{codes, dtype, {part}};
    encode(view, 0, part, values + done);
    decode(view, 0, part, values + done);
  }
}

float* scratch(int slot, std::int64_t count) {
  struct Buffer {
    float* data = nullptr;
    std::int64_t capacity = 0;
    ~Buffer() { std::free(data); }
  };
  constexpr int kSlots = 16;
  thread_local std::array<Buffer, kSlots> buffers;
  if (slot < 0 || slot >= kSlots) fail_internal("cpu scratch", "no slot " + std::to_string(slot));
  Buffer& buffer = buffers[static_cast<std::size_t>(slot)];
  if (count > buffer.capacity) {
    std::free(buffer.data);
    buffer = Buffer{};
    std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(float) + 63) / 64 * 64;
    buffer.data = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (!buffer.data) throw std::bad_alloc();
    buffer.capacity = static_cast<std::int64_t>(bytes / sizeof(float));
  }
  return buffer.data;
}

}  // namespace quern::cpu
