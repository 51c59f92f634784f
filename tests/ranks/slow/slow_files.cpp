// A library to preload: files whose names QUERN_SLOW_FILES ends with take QUERN_SLOW_SECONDS longer to be opened for
// reading, as with cold caches, and to become durable, as on a busy file server. For QUERN_LOST_FILES they do
// not exist.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
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
  return next<int (*)(const char*, int, ...)>("open")(path, flags, mode);
}

extern "C" int fsync(int file) {
  char link[64], path[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = ::readlink(link, path, sizeof path);
  if (length > 0 && is_slow({path, static_cast<std::size_t>(length)})) take_time();
  return next<int (*)(int)>("fsync")(file);
}
