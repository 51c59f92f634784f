#include "base/files/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "quern/error.h"

namespace quern {

namespace {

// Linux reads at most this much in one call.
constexpr std::size_t kLargestRead = std::size_t{1} << 30;
constexpr std::size_t kPiece = std::size_t{1} << 20;

[[noreturn]] void refuse(const std::string& path, const std::string& what, const std::string& found) {
  throw Error(ErrorCode::input, {path, what, found, "a readable file", "check the path and its permissions"});
}

[[noreturn]] void refuse_open(const std::string& path, int reason) {
  if (reason == EMFILE || reason == ENFILE || reason == ENOMEM)
    throw Error(ErrorCode::resources,
                {path, "cannot be opened", std::strerror(reason), "",
                 reason == ENOMEM ? "" : "raise the limit on open files (ulimit -n), or join files"});
  refuse(path, "cannot be opened", std::strerror(reason));
}

}  // namespace

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  if (path_.empty()) refuse("\"\"", "not a path", "an empty text");
  if (path_.find('\0') != std::string::npos) refuse(path_, "not a path", "a zero byte in it");
  file_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // non-blocking: a FIFO must not hang the open
  if (file_ < 0) refuse_open(path_, errno);
  struct stat info {};
  const int failed = ::fstat(file_, &info);
  if (failed != 0 || !S_ISREG(info.st_mode)) {
    std::string found = failed != 0             ? std::strerror(errno)
                        : S_ISDIR(info.st_mode) ? "a directory"
                                                : "not a regular file";
    ::close(file_);
    refuse(path_, "cannot be read", found);
  }
  stamp_ = {static_cast<std::uint64_t>(info.st_size), info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
  try {
    refuse_pointer();
  } catch (...) {
    ::close(file_);
    throw;
  }
}

// What `git clone` leaves of a large file on a machine without git-lfs: three lines of text that name it.
void InputFile::refuse_pointer() const {
  constexpr std::string_view kBegin = "version https://git-lfs.github.com/spec/";
  constexpr std::uint64_t kLongest = 1024;  // bytes; states the format
  if (size() < kBegin.size() || size() >= kLongest) return;
  std::string begin(kBegin.size(), '\0');
  read(0, std::as_writable_bytes(std::span(begin)));
  if (begin == kBegin)
    throw Error(ErrorCode::input, {path_, "a git-lfs pointer, not the file itself", "", "",
                                   "fetch the file with `git lfs pull`, or download it again"});
}

InputFile::~InputFile() {
  if (file_ >= 0) ::close(file_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)), stamp_(other.stamp_) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(file_, other.file_);
  std::swap(stamp_, other.stamp_);
  return *this;
}

void InputFile::read(std::uint64_t offset, std::span<std::byte> out) const {
  if (offset > size() || out.size() > size() - offset) fail_internal(path_, "read past the end of a file");
  auto changed = [&](const std::string& what, const std::string& found, const std::string& expected) {
    throw Error(ErrorCode::input, {path_, what, found, expected, "restore the file; it must not change during a run"});
  };
  struct stat now {};
  if (::fstat(file_, &now) == 0 && static_cast<std::uint64_t>(now.st_size) != size())
    changed("changed while it was read", std::to_string(now.st_size) + " bytes", std::to_string(size()) + " bytes");
  for (std::size_t done = 0; done < out.size();) {
    const std::uint64_t at = offset + done;
    const ssize_t got =
        ::pread(file_, out.data() + done, std::min(out.size() - done, kLargestRead), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path_, "cannot be read at byte " + std::to_string(at), std::strerror(errno));
    if (got == 0)
      changed("changed while it was read", "its end at byte " + std::to_string(at), std::to_string(size()) + " bytes");
    done += static_cast<std::size_t>(got);
  }
}

void InputFile::for_each_piece(std::uint64_t offset,
                               const std::function<bool(std::span<const std::byte>)>& take) const {
  std::vector<std::byte> buffer(static_cast<std::size_t>(std::min<std::uint64_t>(kPiece, size() - offset)));
  while (offset < size()) {
    const std::span<std::byte> piece(buffer.data(),
                                     static_cast<std::size_t>(std::min<std::uint64_t>(kPiece, size() - offset)));
    read(offset, piece);
    if (!take(piece)) return;
    offset += piece.size();
  }
}

std::string InputFile::text() const {
  std::string text(size(), '\0');
  read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace quern
