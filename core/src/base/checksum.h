#pragma once
// The checksum of quern's files: XXH3, 64 bits, seed 0. It finds damage, not malice.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace quern {

std::uint64_t checksum_of(std::span<const std::byte> bytes);

/// Sixteen lower-case hexadecimal digits.
std::string checksum_text(std::uint64_t checksum);

/// The same number from bytes that come in pieces.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;
  void add(std::span<const std::byte> bytes);
  /// Of all bytes added so far.
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace quern
