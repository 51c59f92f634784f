#pragma once
// The random blocks of quern/random.h on the device, and the stochastic rounding of quern/numeric.h: the same bits.

#include <cuda_runtime.h>

#include <cstdint>

#include "quern/random.h"

namespace quern::cuda {

/// Four 32-bit numbers.
struct RandomWords {
  std::uint32_t word[4];
};

/// The words of random_block({seed, purpose, object}, step, index).
__host__ __device__ constexpr RandomWords random_words(std::uint32_t seed_low, std::uint32_t seed_high,
                                                       RandomPurpose purpose, std::uint32_t object, std::uint32_t step,
                                                       std::uint64_t index) {
  std::uint32_t c0 = static_cast<std::uint32_t>(index);
  std::uint32_t c1 = static_cast<std::uint32_t>(index >> 32) ^ (static_cast<std::uint32_t>(purpose) << 24);
  std::uint32_t c2 = step, c3 = object, k0 = seed_low, k1 = seed_high;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0, p1 = std::uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

constexpr bool same_words(std::uint64_t seed, RandomPurpose purpose, std::uint32_t object, std::uint32_t step,
                          std::uint64_t index) {
  const auto want = random_block({seed, purpose, object}, step, index);
  const RandomWords got = random_words(static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                                       purpose, object, step, index);
  return got.word[0] == want[0] && got.word[1] == want[1] && got.word[2] == want[2] && got.word[3] == want[3];
}
static_assert(same_words(0, RandomPurpose::init, 0, 0, 0));
static_assert(same_words(0x123456789abcdef0u, RandomPurpose::round_moment2, 77, 12345, 0x3fedcba98u));

/// value * inverse as an integer, drawn by the value and its place: to_integer_stochastic of quern/numeric.h.
__device__ __forceinline__ float stochastic_integer(float value, float inverse, std::uint32_t place) {
  const float quotient = __fmul_rn(value, inverse), below = floorf(quotient);
  const std::uint32_t word = content_word(__float_as_uint(value), __float_as_uint(inverse), place);
  return static_cast<float>(word >> 8) < (quotient - below) * 0x1p24f ? below + 1.0f : below;
}

/// The bits of fp32 `value` so that their upper half is the bf16 rounded up or down with probability given by the 16
/// low bits of `random`; infinities stay, NaN stays NaN.
__device__ __forceinline__ std::uint32_t stochastic_bits(float value, std::uint32_t random) {
  const std::uint32_t bits = __float_as_uint(value);
  return value != value ? bits | 0x00400000u : bits + (random & 0xffffu);
}

/// Two fp32's upper halves as a pair of bf16, `low` in the low half.
__device__ __forceinline__ std::uint32_t upper_halves(std::uint32_t low, std::uint32_t high) {
  return __byte_perm(low, high, 0x7632);
}

}  // namespace quern::cuda
