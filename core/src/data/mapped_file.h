#pragma once
// A whole file mapped read-only into memory: token files, weights and checkpoints are read this way, so the page cache
// is the only buffer and several processes share it. The file must not shrink while it is mapped.

#include <cstddef>
#include <span>
#include <string>

namespace quern {

class MappedFile {
 public:
  /// An input error when `path` is missing, unreadable or not a regular file. An empty file has no bytes.
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  const std::string& path() const { return path_; }
  /// Valid while this object lives; starts at a page boundary.
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

}  // namespace quern
