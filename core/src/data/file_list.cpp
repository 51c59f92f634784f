#include "data/file_list.h"

#include <glob.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <new>

#include "quern/error.h"

namespace quern {

std::vector<std::string> files_of(const std::string& entry, const std::string& where) {
  if (entry.empty() || entry.find('\0') != std::string::npos)
    throw Error(ErrorCode::config,
                {where, "not a path", entry.empty() ? "\"\"" : "a zero byte in it", "a path or a pattern", ""});
  std::error_code ignored;
  if (entry.find_first_of("*?[") == std::string::npos || std::filesystem::exists(entry, ignored)) return {entry};
  static thread_local std::string unreadable;  // glob's handler of errors is given nothing else
  unreadable.clear();
  auto on_error = [](const char* path, int reason) {
    unreadable = std::string(path) + ": " + std::strerror(reason);
    return 1;
  };
  glob_t found{};
  const int failed = ::glob(entry.c_str(), GLOB_NOSORT | GLOB_ERR, on_error, &found);
  std::vector<std::string> files(found.gl_pathv, found.gl_pathv + (failed == 0 ? found.gl_pathc : 0));
  ::globfree(&found);
  if (failed == GLOB_NOSPACE) throw std::bad_alloc();
  if (failed != 0)
    throw Error(
        ErrorCode::input,
        {where, (failed == GLOB_NOMATCH ? "no file matches \"" : "a folder cannot be read for \"") + entry + "\"",
         unreadable, "a pattern of readable files", ""});
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace quern
