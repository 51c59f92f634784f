#pragma once
// A shuffle without a table: a keyed bijection of [0, count), so any place in any epoch's order is computed on its own
// and resuming needs no history.

#include <cstdint>

namespace quern {

/// The element at place `index` < count of the order that `seed` and `epoch` choose. Up to 8 elements are dealt out
/// anew for each place (Fisher and Yates), so that every order is equally likely; more by `feistel_permuted`.
std::uint64_t permuted(std::uint64_t index, std::uint64_t count, std::uint64_t seed, std::uint32_t epoch);

/// A Feistel network over the next power of four, walked until it lands inside (Black and Rogaway, "Ciphers with
/// Arbitrary Finite Domains", 2002). Of a few elements, some orders are more likely than others.
std::uint64_t feistel_permuted(std::uint64_t index, std::uint64_t count, std::uint64_t seed, std::uint32_t epoch);

}  // namespace quern
