#include "launch/rendezvous/secret.h"

#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <cctype>

#include "quern/error.h"

namespace quern {

Secret fresh_secret() {
  Secret secret{};
  if (::getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size()))
    throw Error(ErrorCode::resources, {.where = "the system", .what = "gives no random numbers"});
  return secret;
}

std::string hex_of(const Secret& secret) {
  std::string text;
  for (const unsigned char byte : secret)
    for (const int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
  return text;
}

std::optional<Secret> secret_from(std::string_view hex) {
  Secret secret{};
  if (hex.size() != 2 * secret.size()) return std::nullopt;
  constexpr std::string_view kDigits = "0123456789abcdef";
  for (std::size_t i = 0; i < hex.size(); ++i) {
    const std::size_t digit = kDigits.find(static_cast<char>(std::tolower(static_cast<unsigned char>(hex[i]))));
    if (digit == std::string_view::npos) return std::nullopt;
    secret[i / 2] = static_cast<unsigned char>(secret[i / 2] << 4 | digit);
  }
  return secret;
}

std::string proof_of(const Secret& secret, std::string_view message) {
  std::string proof(EVP_MAX_MD_SIZE, '\0');
  unsigned size = 0;
  if (!::HMAC(EVP_sha256(), secret.data(), secret.size(), reinterpret_cast<const unsigned char*>(message.data()),
              message.size(), reinterpret_cast<unsigned char*>(proof.data()), &size))
    throw Error(ErrorCode::resources, {.where = "libcrypto", .what = "computes no HMAC"});
  proof.resize(size);
  return proof;
}

bool proves(const Secret& secret, std::string_view message, std::string_view proof) {
  const std::string right = proof_of(secret, message);
  return proof.size() == right.size() && CRYPTO_memcmp(proof.data(), right.data(), right.size()) == 0;
}

}  // namespace quern
