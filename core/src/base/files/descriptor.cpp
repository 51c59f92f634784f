#include "base/files/descriptor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "quern/error.h"

namespace quern {

namespace {

constexpr std::size_t kLargestWrite = std::size_t{1} << 30;  // Linux writes at most twice this in one call

// The first bytes of a regular file, at most `count`.
std::string beginning(int descriptor, std::size_t count) {
  std::string text(count, '\0');
  const ssize_t length = ::pread(descriptor, text.data(), count, 0);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  return text;
}

}  // namespace

void OwnedDescriptor::reset() {
  if (number_ >= 0) ::close(std::exchange(number_, -1));
}

bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), std::min(text.size(), kLargestWrite));
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {  // another program made the open file non-blocking
      pollfd ready{descriptor, POLLOUT, 0};
      ::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool write_if_taken(int descriptor, std::string_view text, std::chrono::milliseconds patience) {
  pollfd ready{descriptor, POLLOUT, 0};
  if (::poll(&ready, 1, static_cast<int>(patience.count())) != 1 || (ready.revents & POLLOUT) == 0) return false;
  return ::write(descriptor, text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

int lock_alone(int descriptor) {
  constexpr int kAttempts = 1000;  // a second; who looks is soon gone
  for (int attempt = 1; ::flock(descriptor, LOCK_EX | LOCK_NB) != 0; ++attempt) {
    if (errno != EWOULDBLOCK || attempt == kAttempts || ::flock(descriptor, LOCK_SH | LOCK_NB) != 0) return errno;
    ::flock(descriptor, LOCK_UN);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return 0;
}

void check_own_file(int descriptor, const std::string& path, const FileKind& kind, const std::string& next) {
  auto refuse = [&](const std::string& found) {
    throw Error(ErrorCode::resources, {.where = path,
                                       .what = "is there already and is not " + std::string(kind.name),
                                       .found = found,
                                       .expected = "a new name, or an older one of its kind",
                                       .next = next});
  };
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) refuse(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) refuse("no regular file");
  const std::string begin = beginning(descriptor, kind.begin.size());
  if (!kind.begin.starts_with(begin)) refuse("a file that begins differently");
}

void check_own_file(const std::string& path, const FileKind& kind, const std::string& next) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0 && errno == ENOENT) return;
  if (file < 0)
    throw Error(ErrorCode::resources,
                {.where = path, .what = "cannot be opened", .found = std::strerror(errno), .next = next});
  try {
    check_own_file(file, path, kind, next);
  } catch (...) {
    ::close(file);
    throw;
  }
  ::close(file);
}

}  // namespace quern
