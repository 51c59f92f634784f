#pragma once
// What the fuzz targets share: files that a reader can open, and what every reader promises of any file: it is read, or
// refused with one Error whose code says whose fault it is and whose text can be printed to a terminal.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <string>
#include <string_view>

#include "base/files/test_directory.h"
#include "base/shorten.h"
#include "quern/error.h"

namespace quern::fuzz {

inline void fail(const std::string& broken, const std::string& detail) {
  std::fprintf(stderr, "%s: %s\n", broken.c_str(), detail.c_str());
  std::abort();
}

/// A directory for the life of the process, under TMPDIR.
inline const TestDirectory& scratch() {
  static const TestDirectory directory;
  return directory;
}

/// Writes a file of the scratch directory anew and returns its path.
inline std::string file(const std::string& name, std::string_view bytes) {
  std::string path = scratch() / name;
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return path;
}

inline std::string_view text(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Runs `action`; returns whether it accepted. An Error must have one of `codes` and a message of bounded length
/// without control characters; other exceptions go through and end the process.
template <class Action>
bool accepted(std::initializer_list<ErrorCode> codes, Action action) {
  constexpr std::size_t kLongest = std::size_t{1} << 16;
  try {
    action();
    return true;
  } catch (const Error& error) {
    const std::string message = error.what();
    bool known = false;
    for (ErrorCode code : codes) known = known || error.code() == code;
    if (!known) fail("an error of code " + std::to_string(static_cast<int>(error.code())), message);
    if (message.size() > kLongest) fail("a message without bound", std::to_string(message.size()) + " bytes");
    std::string line = message;
    std::replace(line.begin(), line.end(), '\n', ' ');
    if (printable(line, line.size()) != line) fail("a message that cannot be printed", message);
    return false;
  }
}

}  // namespace quern::fuzz
