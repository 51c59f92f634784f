#pragma once
// A file without a name, in whole blocks: its bytes go to the disk past the page cache where the file system allows it,
// and each block is checked against its checksum when it is read. Nothing of it stays behind, however a run ends.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace quern::disk {

/// Blocks of the file start at multiples of it, and so does memory that is read or written: what O_DIRECT asks for.
constexpr std::size_t kBlock = 4096;

class DiskFile {
 public:
  /// In `folder`, which is made. Throws a resources error.
  explicit DiskFile(std::string folder);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  /// Appends zeroed blocks that the file system has reserved; returns the first. Throws a resources error when they do
  /// not fit, and the file is as before.
  std::size_t add(std::size_t blocks);

  /// `memory` is aligned. Returns what is wrong, or empty. Threads may work on different blocks.
  std::string read(std::byte* memory, std::size_t first, std::size_t count);
  std::string write(const std::byte* memory, std::size_t first, std::size_t count);

 private:
  std::string fault(const char* verb, std::size_t count, const std::string& reason) const;

  std::string folder_;
  int file_ = -1;
  std::vector<std::uint32_t> checksums_;  // of each block
};

}  // namespace quern::disk
