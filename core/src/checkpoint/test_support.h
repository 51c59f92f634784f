#pragma once
// What the tests of this folder share: raw safetensors files, texts of files, and the refusal of an action.

#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

#include "quern/error.h"

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

struct Refusal {
  ErrorCode code = ErrorCode{0};
  std::string text = "accepted";
  bool holds(const std::string& words) const { return text.find(words) != std::string::npos; }
};

inline Refusal refusal_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {};
}

}  // namespace quern

/// Expects an error of that code whose message holds `words`.
#define CHECK_REFUSED(expected_code, words, ...)                          \
  do {                                                                    \
    ::quern::Refusal refusal = ::quern::refusal_of([&] { __VA_ARGS__; }); \
    CAPTURE(refusal.text);                                                \
    CAPTURE(std::string(words));                                          \
    CHECK(refusal.code == ::quern::ErrorCode::expected_code);             \
    CHECK(refusal.holds(words));                                          \
  } while (false)
