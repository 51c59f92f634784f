#include "data/sources/permutation.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "quern/random.h"

namespace quern {

namespace {
constexpr std::uint32_t kRounds = 8;
constexpr std::uint64_t kMostDealt = 8;  // of more, no run sees a share of the orders that could tell
}  // namespace

std::uint64_t permuted(std::uint64_t index, std::uint64_t count, std::uint64_t seed, std::uint32_t epoch) {
  if (count > kMostDealt) return feistel_permuted(index, count, seed, epoch);
  std::array<std::uint8_t, kMostDealt> order;
  for (std::uint64_t i = 0; i < count; ++i) order[i] = static_cast<std::uint8_t>(i);
  for (std::uint64_t i = count; i > 1; --i) {
    // 32 random bits times i: the chance of an element is within 2^-24 of 1 / i.
    const std::uint64_t word = random_word({seed, RandomPurpose::shuffle, kRounds}, epoch, i);
    std::swap(order[i - 1], order[word * i >> 32]);
  }
  return order[index];
}

std::uint64_t feistel_permuted(std::uint64_t index, std::uint64_t count, std::uint64_t seed, std::uint32_t epoch) {
  if (count < 2) return index;
  int half_bits = std::max(2, (static_cast<int>(std::bit_width(count - 1)) + 1) / 2);
  std::uint64_t mask = (std::uint64_t{1} << half_bits) - 1;
  do {  // the domain is under 4 * count (16 for tiny counts): few walks
    std::uint64_t left = index >> half_bits, right = index & mask;
    for (std::uint32_t round = 0; round < kRounds; ++round) {
      std::uint64_t mixed = left ^ (random_block({seed, RandomPurpose::shuffle, round}, epoch, right)[0] & mask);
      left = right;
      right = mixed;
    }
    index = (left << half_bits) | right;
  } while (index >= count);
  return index;
}

}  // namespace quern
