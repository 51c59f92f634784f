#include "data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "quern/error.h"

namespace quern {

namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& what, const std::string& found) {
  throw Error(ErrorCode::input, {path, what, found, "a readable file", "check the path and its permissions"});
}

}  // namespace

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // non-blocking: a FIFO must not hang the open
  if (file < 0) refuse(path_, "cannot be opened", std::strerror(errno));
  struct stat info {};
  int failed = ::fstat(file, &info);
  if (failed != 0 || !S_ISREG(info.st_mode)) {
    std::string found = failed != 0             ? std::strerror(errno)
                        : S_ISDIR(info.st_mode) ? "a directory"
                                                : "not a regular file";
    ::close(file);
    refuse(path_, "cannot be read", found);
  }
  auto size = static_cast<std::size_t>(info.st_size);
  void* memory = size == 0 ? nullptr : ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  int reason = errno;
  ::close(file);
  if (memory == MAP_FAILED)
    throw Error(ErrorCode::resources,
                {path_, "cannot be mapped", std::strerror(reason), "", "check the address space limit (ulimit -v)"});
  bytes_ = {static_cast<const std::byte*>(memory), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace quern
