#pragma once
// What the system's calls on file descriptors leave to their callers: whole writes, writes that may not block, and
// which files a program may overwrite.

#include <chrono>
#include <string>
#include <string_view>

namespace quern {

/// Writes all of `text`; false with errno set when that is not possible. Some of it may then be written.
bool write_all(int descriptor, std::string_view text);

/// Writes a short text when the reader takes it within `patience`, and else not at all. May be called from a signal
/// handler.
bool write_if_taken(int descriptor, std::string_view text, std::chrono::milliseconds patience);

/// A kind of file that quern writes, and how it tells its own.
struct FileKind {
  std::string_view name;   ///< "a log of quern"
  std::string_view begin;  ///< what every such file begins with
};
/// Refuses to overwrite the open file unless it is a regular file that is empty or begins as its kind does: a resources
/// error that ends with `next`.
void check_own_file(int descriptor, const std::string& path, const FileKind& kind, const std::string& next);
/// The same of what is at `path`, links followed; absent is fine.
void check_own_file(const std::string& path, const FileKind& kind, const std::string& next);

}  // namespace quern
