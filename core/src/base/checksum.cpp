#include "base/checksum.h"

#include <cstdio>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace quern {

struct Checksum::State {
  XXH3_state_t xxh3;
};

std::uint64_t checksum_of(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string checksum_text(std::uint64_t checksum) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(checksum));
  return text;
}

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh3); }
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

void Checksum::add(std::span<const std::byte> bytes) { XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size()); }
std::uint64_t Checksum::value() const { return XXH3_64bits_digest(&state_->xxh3); }

}  // namespace quern
