#include "data/file_list.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>

#include "quern/error.h"

namespace quern {

std::vector<std::string> files_of(const std::string& entry, const std::string& where) {
  std::error_code ignored;
  if (entry.find_first_of("*?[") == std::string::npos || std::filesystem::exists(entry, ignored)) return {entry};
  glob_t found{};
  const int failed = ::glob(entry.c_str(), GLOB_NOSORT | GLOB_ERR, nullptr, &found);
  std::vector<std::string> files(found.gl_pathv, found.gl_pathv + (failed == 0 ? found.gl_pathc : 0));
  ::globfree(&found);
  if (failed == GLOB_NOSPACE) throw std::bad_alloc();
  if (failed != 0)
    throw Error(ErrorCode::input, {where, failed == GLOB_NOMATCH ? "no file matches" : "a folder cannot be read for",
                                   "\"" + entry + "\"", "a pattern of readable files", ""});
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace quern
