#pragma once
// A file that others wrote: token files, weights, checkpoints. It is read by position and never mapped, since another
// process may shorten, remove or replace it at any time: that ends in an error, not in a signal.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace quern {

class InputFile {
 public:
  /// An input error when `path` is missing, unreadable, not a regular file or a git-lfs pointer in its place; a
  /// resources error without a descriptor.
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;

  /// What tells a file from another of the same name.
  struct Stamp {
    std::uint64_t bytes = 0;
    std::int64_t seconds = 0, nanoseconds = 0;  ///< when it was last written
    bool operator==(const Stamp&) const = default;
  };

  const std::string& path() const { return path_; }
  /// As it was when it was opened.
  const Stamp& stamp() const { return stamp_; }
  std::uint64_t size() const { return stamp_.bytes; }

  /// Fills `out` with the bytes from `offset` on. An input error when they cannot be had, or the file has another size
  /// by now; one that was replaced or removed under its name goes on as it was. Safe to call from several threads.
  void read(std::uint64_t offset, std::span<std::byte> out) const;
  /// Hands over the bytes from `offset` to the end, in pieces of at most 1 MiB, until `take` returns false.
  void for_each_piece(std::uint64_t offset, const std::function<bool(std::span<const std::byte>)>& take) const;
  /// All of it.
  std::string text() const;

 private:
  void refuse_pointer() const;

  std::string path_;
  int file_ = -1;
  Stamp stamp_;
};

}  // namespace quern
