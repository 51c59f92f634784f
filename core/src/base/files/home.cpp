#include "base/files/home.h"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>
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

std::string cached_model(const std::string& name) {
  namespace fs = std::filesystem;
  const std::size_t slash = name.find('/');
  auto spells = [](std::string_view part) {
    return !part.empty() && part[0] != '.' &&
           part.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == part.npos;
  };
  std::error_code none;
  if (slash == name.npos || !spells(name.substr(0, slash)) || !spells(name.substr(slash + 1)) || fs::exists(name, none))
    return name;
  auto given = [](const char* variable, const char* below) {
    const char* const text = std::getenv(variable);
    return text && *text ? text + std::string(below) : std::string();
  };
  std::string cache = given("HF_HUB_CACHE", "");
  if (cache.empty()) cache = given("HF_HOME", "/hub");
  if (cache.empty()) cache = home_of("") + "/.cache/huggingface/hub";
  const fs::path model = fs::path(cache) / ("models--" + name.substr(0, slash) + "--" + name.substr(slash + 1));
  std::string commit;
  std::ifstream(model / "refs" / "main") >> commit;
  const fs::path folder = model / "snapshots" / commit;
  return !commit.empty() && fs::is_directory(folder, none) ? folder.string() : name;
}

}  // namespace quern
