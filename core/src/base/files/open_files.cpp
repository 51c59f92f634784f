#include "base/files/open_files.h"

#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "quern/error.h"

namespace quern {

std::size_t OpenFiles::default_most() {
  constexpr rlim_t kMost = 256;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMost;
  return static_cast<std::size_t>(std::clamp<rlim_t>(limit.rlim_cur / 8, 1, kMost));
}

std::shared_ptr<const InputFile> OpenFiles::open(const std::string& path) {
  std::lock_guard lock(mutex_);
  const auto at = files_.try_emplace(path).first;
  Entry& entry = at->second;
  if (entry.file) {
    used_.splice(used_.begin(), used_, entry.used);
    return entry.file;
  }
  while (used_.size() >= most_) close_last();
  auto file = std::make_shared<const InputFile>(path);
  if (!entry.stamp) entry.stamp = file->stamp();
  if (file->stamp() != *entry.stamp)
    throw Error(ErrorCode::input,
                {path, "replaced or rewritten during the run", std::to_string(file->size()) + " bytes",
                 std::to_string(entry.stamp->bytes) + " bytes and the time of writing that it had",
                 "restore the file; it must not change during a run"});
  used_.push_front(&at->first);
  entry.used = used_.begin();
  return entry.file = std::move(file);
}

void OpenFiles::close_last() {
  files_.at(*used_.back()).file = nullptr;
  used_.pop_back();
}

}  // namespace quern
