#pragma once
// Counter-based random numbers: Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
// A draw depends only on its key and counter, so any element can be drawn anywhere: shards, devices and resumed runs
// agree. Used by weight initialisation, shuffling, stochastic rounding and dropout.

#include <array>
#include <cstdint>

namespace quern {

/// Purpose of a stream of numbers; keeps streams with equal counters independent.
enum class RandomPurpose : std::uint32_t {
  init = 1,
  shuffle = 2,
  round_master = 3,
  round_moment1 = 4,
  round_moment2 = 5,
  sample = 6,
  dropout = 7
};

/// Names one stream: the run's seed, the purpose, and the parameter (or other object) it belongs to.
struct RandomKey {
  std::uint64_t seed = 0;
  RandomPurpose purpose = RandomPurpose::init;
  std::uint32_t object = 0;
};

namespace detail {
constexpr std::array<std::uint32_t, 4> philox_rounds(std::array<std::uint32_t, 4> c, std::uint32_t k0,
                                                     std::uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c[0];
    std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}
}  // namespace detail

/// Four 32-bit numbers for block `index` of the stream at `step`; element i of a tensor uses word i % 4 of block i / 4.
constexpr std::array<std::uint32_t, 4> random_block(const RandomKey& key, std::uint32_t step, std::uint64_t index) {
  std::uint32_t purpose = static_cast<std::uint32_t>(key.purpose);
  return detail::philox_rounds(
      {static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32) ^ (purpose << 24), step, key.object},
      static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32));
}

/// The number of element `index`.
constexpr std::uint32_t random_word(const RandomKey& key, std::uint32_t step, std::uint64_t index) {
  return random_block(key, step, index / 4)[index % 4];
}

/// 32 bits that depend on a value and its index, for rounding without a stream: `value` and `scale` are the bits of
/// fp32 numbers, `place` is an index. The same value at the same index gives the same bits on another rank, in a
/// repeated run, or in a part of the tensor. The last steps are the finalizer of MurmurHash3 (Appleby).
constexpr std::uint32_t content_word(std::uint32_t value, std::uint32_t scale, std::uint32_t place) {
  std::uint32_t h = value * 0x9E3779B1u + (scale ^ scale >> 15) * 0x85EBCA77u + place * 0xC2B2AE3Du;
  h = (h ^ h >> 16) * 0x85EBCA6Bu;
  h = (h ^ h >> 13) * 0xC2B2AE35u;
  return h ^ h >> 16;
}

/// What the masks of a dropout op of a micro-step have in common; `object` tells the ops of a program apart.
constexpr std::uint32_t dropout_salt(std::uint64_t seed, std::uint32_t object, std::uint32_t step,
                                     std::uint32_t micro_step) {
  return random_block({seed, RandomPurpose::dropout, object}, step, micro_step)[0];
}

/// Whether dropout keeps an element, given the bits of its value in fp32 and its index: drawn by content, so that a
/// mask is the same wherever and whenever the micro-step is computed, and another one in each layer.
constexpr bool dropout_keeps(std::uint32_t value, std::uint32_t salt, std::uint32_t index, float probability) {
  return static_cast<float>(content_word(value, salt, index) >> 8) >= probability * 0x1p24f;
}

/// Uniform in (0, 1], never zero, so that its logarithm is finite.
constexpr float to_unit(std::uint32_t word) { return (static_cast<float>(word >> 8) + 1.0f) * 0x1p-24f; }

}  // namespace quern
