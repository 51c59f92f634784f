#pragma once
// What the ranks of one run know and nobody else does. Whoever knows it can prove that without saying it.

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace quern {

using Secret = std::array<unsigned char, 32>;

/// From the system's random numbers.
Secret fresh_secret();
/// 64 hexadecimal digits.
std::string hex_of(const Secret& secret);
/// None unless `hex` is 64 hexadecimal digits.
std::optional<Secret> secret_from(std::string_view hex);

/// HMAC-SHA-256 (RFC 2104) of `message`, 32 bytes.
std::string proof_of(const Secret& secret, std::string_view message);
/// Whether `proof` is that, in a time that does not depend on where they differ.
bool proves(const Secret& secret, std::string_view message, std::string_view proof);

}  // namespace quern
