#pragma once
// What the system's calls on file descriptors leave to their callers: whole writes, writes that may not block, closing,
// and which files a program may overwrite.

#include <chrono>
#include <string>
#include <string_view>
#include <utility>

namespace quern {

/// A descriptor that is closed with its owner; -1: none.
class OwnedDescriptor {
 public:
  OwnedDescriptor() = default;
  explicit OwnedDescriptor(int number) : number_(number) {}
  ~OwnedDescriptor() { reset(); }
  OwnedDescriptor(OwnedDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  OwnedDescriptor& operator=(OwnedDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  void reset();

 private:
  int number_ = -1;
};

/// Writes all of `text`; false with errno set when that is not possible. Some of it may then be written.
bool write_all(int descriptor, std::string_view text);

/// Writes a short text when the reader takes it within `patience`, and else not at all. May be called from a signal
/// handler.
bool write_if_taken(int descriptor, std::string_view text, std::chrono::milliseconds patience);

/// Locks an open file or folder for this process alone, as flock: 0, or errno; EWOULDBLOCK: another one has it. Who
/// only looks whether it is locked, as quern-tools, shares the lock for an instant, which is waited for.
int lock_alone(int descriptor);

/// A kind of file that quern writes, and how it tells its own.
struct FileKind {
  std::string_view name;   ///< "a log of quern"
  std::string_view begin;  ///< what every such file begins with
};
/// Refuses to overwrite the open file unless it is a regular file that is empty or begins as its kind does: a resources
/// error that ends with `next`.
void check_own_file(int descriptor, const std::string& path, const FileKind& kind, const std::string& next);
/// The same of the file at `path`, links followed; absent is fine.
void check_own_file(const std::string& path, const FileKind& kind, const std::string& next);

}  // namespace quern
