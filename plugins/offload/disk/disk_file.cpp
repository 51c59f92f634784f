#include "disk_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "quern/error.h"

namespace quern::disk {

namespace {

std::uint32_t checksum(const std::byte* block) { return static_cast<std::uint32_t>(XXH3_64bits(block, kBlock)); }

/// O_TMPFILE where there is one, or a name that is gone at once. -1: errno says why.
int open_nameless(const std::string& folder, int flags) {
  const int file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return file;
  std::string name = folder + "/offload-XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC | flags);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

/// Of the file's file system.
std::uint64_t free_bytes(int file) {
  struct statvfs system {};
  if (::fstatvfs(file, &system) != 0) return 0;
  return std::uint64_t{system.f_bavail} * system.f_frsize;
}

}  // namespace

DiskFile::DiskFile(std::string folder) : folder_(std::move(folder)) {
  std::error_code failure;
  std::filesystem::create_directories(folder_, failure);
  file_ = open_nameless(folder_, O_DIRECT);
  if (file_ < 0 && errno == EINVAL) file_ = open_nameless(folder_, 0);  // a file system in memory, for one
  if (file_ < 0)
    throw Error(ErrorCode::resources, {.where = "offload disk",
                                       .what = "no file can be made in " + folder_,
                                       .found = std::strerror(errno),
                                       .expected = "a folder that can be written",
                                       .next = "set memory.disk.folder"});
}

DiskFile::~DiskFile() { ::close(file_); }

std::size_t DiskFile::add(std::size_t blocks) {
  const std::size_t first = checksums_.size();
  const std::uint64_t room = free_bytes(file_);
  int failure = blocks > room / kBlock ? ENOSPC : 0;
  if (failure == 0 && blocks > 0)
    failure = ::posix_fallocate(file_, static_cast<off_t>(first * kBlock), static_cast<off_t>(blocks * kBlock));
  if (failure != 0) {
    [[maybe_unused]] const int ignored = ::ftruncate(file_, static_cast<off_t>(first * kBlock));
    throw Error(ErrorCode::resources,
                {.where = "offload disk",
                 .what = "the state does not fit into " + folder_ + " (" + std::strerror(failure) + ")",
                 .found = std::to_string(room) + " bytes that are free",
                 .expected = std::to_string(blocks * kBlock),
                 .next = "make room, set memory.disk.folder to another disk, or keep less state there"});
  }
  static constexpr std::array<std::byte, kBlock> kZeros{};
  checksums_.resize(first + blocks, checksum(kZeros.data()));
  return first;
}

std::string DiskFile::read(std::byte* memory, std::size_t first, std::size_t count) {
  for (std::size_t done = 0; done < count * kBlock;) {
    const ssize_t got = ::pread(file_, memory + done, count * kBlock - done, static_cast<off_t>(first * kBlock + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return fault("read", count, got < 0 ? std::strerror(errno) : "the file is shorter than it was");
    done += static_cast<std::size_t>(got);
  }
  for (std::size_t i = 0; i < count; ++i)
    if (checksum(memory + i * kBlock) != checksums_[first + i])
      return fault("read", count, "a block has other bytes than were written: the disk or its driver lost them");
  return {};
}

std::string DiskFile::write(const std::byte* memory, std::size_t first, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) checksums_[first + i] = checksum(memory + i * kBlock);
  for (std::size_t done = 0; done < count * kBlock;) {
    const ssize_t put =
        ::pwrite(file_, memory + done, count * kBlock - done, static_cast<off_t>(first * kBlock + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return fault("write", count, put < 0 ? std::strerror(errno) : "the disk takes no more");
    done += static_cast<std::size_t>(put);
  }
  return {};
}

std::string DiskFile::fault(const char* verb, std::size_t count, const std::string& reason) const {
  return std::string("offload disk: cannot ") + verb + " " + std::to_string(count * kBlock) + " bytes in " + folder_ +
         ": " + reason + "; start the run again, and it goes on from its newest checkpoint";
}

}  // namespace quern::disk
