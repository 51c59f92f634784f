#pragma once
// Raw safetensors files for the tests of this folder and of hf.

#include <cstdint>
#include <cstring>
#include <string>

namespace quern {

/// A safetensors file as bytes, from any header text.
inline std::string raw_safetensors(const std::string& header, std::size_t data_bytes) {
  std::uint64_t length = header.size();
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  return text + header + std::string(data_bytes, '\0');
}

}  // namespace quern
