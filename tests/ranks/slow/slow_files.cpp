// A library to preload: files whose names QUERN_SLOW_FILES ends with take QUERN_SLOW_SECONDS longer to be opened for
// reading, as with cold caches, and to become durable, as on a busy file server. For QUERN_LOST_FILES they do
// not exist. With QUERN_KILL_AT=7 the process is killed before its seventh operation on what QUERN_KILL_FILES is in the
// path of: opening for writing, write, fsync, rename, mkdir, unlink.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string_view>

namespace {

bool is_one(const char* variable, std::string_view path) {
  const char* const name = std::getenv(variable);
  return name && path.ends_with(name);
}

bool is_slow(std::string_view path) { return is_one("QUERN_SLOW_FILES", path); }

void take_time() {
  const char* const text = std::getenv("QUERN_SLOW_SECONDS");
  const double seconds = text ? std::atof(text) : 0;
  timespec left{static_cast<time_t>(seconds),
                static_cast<long>(1e9 * (seconds - static_cast<double>(static_cast<time_t>(seconds))))};
  while (::nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

std::string_view path_of(int file, char (&path)[4096]) {
  char link[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = ::readlink(link, path, sizeof path);
  return {path, static_cast<std::size_t>(length < 0 ? 0 : length)};
}

void operate_on(std::string_view path) {
  static const char* const files = std::getenv("QUERN_KILL_FILES");
  static std::atomic<int> left{files ? std::atoi(std::getenv("QUERN_KILL_AT")) : 0};
  if (files && path.find(files) != std::string_view::npos && --left == 0) ::raise(SIGKILL);
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = va_arg(arguments, mode_t);
  va_end(arguments);
  if ((flags & O_ACCMODE) == O_RDONLY && is_slow(path)) take_time();
  if (is_one("QUERN_LOST_FILES", path)) return errno = ENOENT, -1;
  if ((flags & O_ACCMODE) != O_RDONLY) operate_on(path);
  return next<int (*)(const char*, int, ...)>("open")(path, flags, mode);
}

extern "C" int fsync(int file) {
  char path[4096];
  const std::string_view name = path_of(file, path);
  if (is_slow(name)) take_time();
  operate_on(name);
  return next<int (*)(int)>("fsync")(file);
}

extern "C" ssize_t write(int file, const void* bytes, std::size_t count) {
  char path[4096];
  if (std::getenv("QUERN_KILL_FILES")) operate_on(path_of(file, path));
  return next<ssize_t (*)(int, const void*, std::size_t)>("write")(file, bytes, count);
}

extern "C" int rename(const char* from, const char* to) noexcept {
  operate_on(from);
  return next<int (*)(const char*, const char*)>("rename")(from, to);
}

extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  operate_on(from);
  return next<int (*)(int, const char*, int, const char*, unsigned)>("renameat2")(from_folder, from, to_folder, to,
                                                                                  flags);
}

extern "C" int mkdir(const char* path, mode_t mode) noexcept {
  operate_on(path);
  return next<int (*)(const char*, mode_t)>("mkdir")(path, mode);
}

extern "C" int unlinkat(int folder, const char* path, int flags) noexcept {
  char buffer[4096];
  operate_on(path[0] == '/' ? path : path_of(folder, buffer));
  return next<int (*)(int, const char*, int)>("unlinkat")(folder, path, flags);
}
