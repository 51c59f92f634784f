#pragma once
// Vector code without vector types: loops that the compiler vectorises, compiled for several CPUs and chosen when the
// library is loaded. Functions marked QUERN_CPU_CLONES must hold their loops themselves (a lambda inside is not
// cloned), and what they call is always_inline all the way down: __builtin_bit_cast, since std::bit_cast would stay
// a call.

#include <cstdint>

// The clones are instruction set levels: a name like "haswell" would match that vendor's own processors alone.
// Sanitized builds run a single version: function multiversioning resolves before the sanitizer's runtime is ready.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define QUERN_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define QUERN_CPU_CLONES
#endif

namespace quern::cpu {

/// e^x, within 2 ulp; branch-free so that loops over it vectorise. Cephes polynomial after range reduction by ln 2.
[[gnu::always_inline]] inline float fast_exp(float x) {
  x = x < -87.3f ? -87.3f : (x > 88.3f ? 88.3f : x);
  float n = x * 1.44269504088896341f + 12582912.0f;  // round to nearest by adding 1.5 * 2^23
  std::int32_t exponent = __builtin_bit_cast(std::int32_t, n) - 0x4b400000;
  n -= 12582912.0f;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * __builtin_bit_cast(float, (exponent + 127) << 23);
}

}  // namespace quern::cpu
