#pragma once
// What the tests of this folder share: raw safetensors files, and texts of files.

#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

namespace quern {

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_text(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

/// A safetensors file as bytes, from any header text.
inline std::string raw_safetensors(const std::string& header, std::size_t data_bytes) {
  std::uint64_t length = header.size();
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  return text + header + std::string(data_bytes, '\0');
}

}  // namespace quern
