#include "launch/rank_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <system_error>

#include "base/files/durable_file.h"
#include "quern/error.h"

namespace quern {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "quern-ranks-";

OwnedDescriptor open_folder(const fs::path& path) {
  return OwnedDescriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

/// What the user named as the folder for temporary files, as the standard library looks for it.
std::string parent_named() {
  for (const char* name : {"TMPDIR", "TMP", "TEMP", "TEMPDIR"})
    if (const char* const value = std::getenv(name)) return value;
  return "/tmp";
}

}  // namespace

RankFolder::RankFolder() {
  remove_left();
  std::error_code none;
  const fs::path parent = fs::temp_directory_path(none);
  if (none)
    throw Error(ErrorCode::resources, {.where = "TMPDIR",
                                       .what = "no folder can be made for the ranks",
                                       .found = "\"" + parent_named() + "\": " + none.message(),
                                       .expected = "a folder that can be written",
                                       .next = "set TMPDIR to one"});
  do {  // again, when somebody took it for left behind before the lock
    std::string path = parent / (std::string(kPrefix) + "XXXXXX");
    if (!::mkdtemp(path.data())) fail_resources(path, "no folder can be made for the ranks", errno);
    path_ = path;
    lock_ = open_folder(path_);
    if (lock_) ::flock(lock_.get(), LOCK_EX);
  } while (::access(path_.c_str(), F_OK) != 0);
}

RankFolder::~RankFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void RankFolder::remove_left() noexcept try {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(fs::temp_directory_path())) {
    if (!entry.path().filename().string().starts_with(kPrefix)) continue;
    const OwnedDescriptor folder = open_folder(entry.path());
    struct stat about {};
    if (folder && ::fstat(folder.get(), &about) == 0 && about.st_uid == ::geteuid() &&
        ::flock(folder.get(), LOCK_EX | LOCK_NB) == 0)
      fs::remove_all(entry.path(), ignored);
  }
} catch (const std::exception&) {  // it stays
}

}  // namespace quern
