#include "runtime/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "quern/error.h"

namespace quern::cpu {

namespace {

constexpr std::size_t kPiece = std::size_t{16} << 20;  // copied at a time, so that this much is there twice

/// The bytes of a handle.
struct Place {
  std::uint64_t bytes;   // of the allocation
  std::uint64_t offset;  // in it
};

[[noreturn]] void refuse(const char* what, std::string found, std::string expected = {}, std::string next = {}) {
  throw Error(ErrorCode::resources, {.where = "device cpu",
                                     .what = what,
                                     .found = std::move(found),
                                     .expected = std::move(expected),
                                     .next = std::move(next)});
}

/// A file without a name. The limit is looked at first, since growing a file past it ends the process.
int make_file(std::size_t bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < bytes)
    refuse("memory cannot be shared", std::to_string(limit.rlim_cur) + " bytes as the largest file",
           std::to_string(bytes), "raise ulimit -f");
  const int file = ::memfd_create("quern", MFD_CLOEXEC);
  if (file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) == 0) return file;
  const std::string why = std::strerror(errno);
  if (file >= 0) ::close(file);
  refuse("memory cannot be shared", why, {}, "raise the limit on open files (ulimit -n), or free memory");
}

/// The pages of `block` become `file`'s, with the same contents, piece by piece.
void exchange(char* block, std::size_t bytes, int file) {
  for (std::size_t at = 0; at < bytes; at += kPiece) {
    const std::size_t size = std::min(kPiece, bytes - at);
    const auto offset = static_cast<off_t>(at);
    for (std::size_t written = 0; written < size;) {
      const ssize_t now = ::pwrite(file, block + at + written, size - written, offset + static_cast<off_t>(written));
      if (now < 0 && errno == EINTR) continue;
      if (now <= 0) refuse("memory cannot be shared", std::strerror(errno));
      written += static_cast<std::size_t>(now);
    }
    if (::mmap(block + at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset) == MAP_FAILED)
      refuse("memory cannot be shared", std::strerror(errno));
  }
}

}  // namespace

SharedMemory::~SharedMemory() {
  for (Blocks* blocks : {&own_, &imported_})
    while (!blocks->empty()) remove(*blocks, blocks->begin()->first);
}

void* SharedMemory::allocate(std::size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  const std::lock_guard lock(mutex_);
  own_[static_cast<char*>(memory)] = {.bytes = bytes};
  return memory;
}

void SharedMemory::release(void* memory) noexcept { remove(own_, memory); }
void SharedMemory::release_imported(void* memory) noexcept { remove(imported_, memory); }

SharedHandle SharedMemory::share(void* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = around(own_, memory);
  if (found == own_.end()) refuse("memory to be shared is not of this device", "another address");
  auto& [first, block] = *found;
  if (block.descriptor < 0) {
    block.descriptor = make_file(block.bytes);
    exchange(first, block.bytes, block.descriptor);
  }
  const Place place{block.bytes, static_cast<std::uint64_t>(static_cast<char*>(memory) - first)};
  SharedHandle handle{.bytes = std::string(reinterpret_cast<const char*>(&place), sizeof place),
                      .descriptor = ::fcntl(block.descriptor, F_DUPFD_CLOEXEC, 0)};
  if (handle.descriptor < 0) refuse("memory cannot be shared", std::strerror(errno));
  return handle;
}

void* SharedMemory::import(const SharedHandle& handle) {
  Place place{};
  struct stat file {};
  const bool whole = handle.bytes.size() == sizeof place;
  if (whole) std::memcpy(&place, handle.bytes.data(), sizeof place);
  if (!whole || place.offset >= place.bytes || ::fstat(handle.descriptor, &file) != 0 ||
      static_cast<std::uint64_t>(file.st_size) < place.bytes)
    refuse("another process's memory cannot be mapped", "a handle that does not fit its file", "one of a cpu device");
  void* memory = ::mmap(nullptr, place.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, handle.descriptor, 0);
  if (memory == MAP_FAILED) refuse("another process's memory cannot be mapped", std::strerror(errno));
  const std::lock_guard lock(mutex_);
  imported_[static_cast<char*>(memory)] = {.bytes = place.bytes};
  return static_cast<char*>(memory) + place.offset;
}

SharedMemory::Blocks::iterator SharedMemory::around(Blocks& blocks, void* memory) {
  const auto behind = blocks.upper_bound(static_cast<char*>(memory));
  if (behind == blocks.begin()) return blocks.end();
  const auto found = std::prev(behind);
  return static_cast<char*>(memory) < found->first + found->second.bytes ? found : blocks.end();
}

void SharedMemory::remove(Blocks& blocks, void* memory) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = around(blocks, memory);
  if (found == blocks.end()) return;
  ::munmap(found->first, found->second.bytes);
  if (found->second.descriptor >= 0) ::close(found->second.descriptor);
  blocks.erase(found);
}

}  // namespace quern::cpu
