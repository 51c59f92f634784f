#pragma once
// Words by which streams signal each other, in memory that processes may share.

#include <cstdint>

namespace quern::cpu {

/// Stores after all that this thread did, and wakes who waits.
void set_word(std::uint32_t* word, std::uint32_t value);
/// Sleeps until a bit of `mask` is set.
void await_word(const std::uint32_t* word, std::uint32_t mask);

}  // namespace quern::cpu
