#pragma once
// The calls that a rank has enqueued, in memory that its peers read: they compare theirs with them.

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "shared/collectives/calls.h"

namespace quern::memcpy {

/// Written by one rank, from one thread; all zeros is an empty one. The last `kKept` calls can be read.
template <std::uint64_t kKept>
class Ledger {
 public:
  struct Entry {
    collectives::Call call;
    std::uint64_t history;  // a digest of this call and all before it
  };

  /// Returns the call's number, from 0 on.
  std::uint64_t add(const collectives::Call& call) {
    const std::uint64_t number = count_;
    const std::uint64_t before = number == 0 ? 0 : entries_[(number - 1) % kKept].history;
    entries_[number % kKept] = {call, collectives::digest(before, call)};
    count_ = number + 1;
    return number;
  }
  /// None where the call is not there yet, or not any more.
  std::optional<Entry> find(std::uint64_t number) const {
    if (count_ <= number) return std::nullopt;
    const Entry entry = entries_[number % kKept];
    // The writer may be about to write over the oldest.
    return count_ - number < kKept ? std::optional(entry) : std::nullopt;
  }

 private:
  std::atomic<std::uint64_t> count_;
  std::array<Entry, kKept> entries_;
};

}  // namespace quern::memcpy
