#include "base/files/home.h"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace quern {

namespace {

/// Empty: unknown.
std::string home_of(const std::string& user) {
  if (const char* home = user.empty() ? std::getenv("HOME") : nullptr; home && *home != '\0') return home;
  std::vector<char> text(std::size_t{1} << 16);
  passwd entry{}, *found = nullptr;
  const int failed = user.empty() ? ::getpwuid_r(::getuid(), &entry, text.data(), text.size(), &found)
                                  : ::getpwnam_r(user.c_str(), &entry, text.data(), text.size(), &found);
  return failed == 0 && found && found->pw_dir ? found->pw_dir : "";
}

}  // namespace

std::string expand_home(const std::string& path) {
  if (!path.starts_with('~')) return path;
  const std::size_t end = std::min(path.find('/'), path.size());
  const std::string home = home_of(path.substr(1, end - 1));
  return home.empty() ? path : home + path.substr(end);
}

}  // namespace quern
