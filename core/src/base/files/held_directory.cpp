#include "base/files/held_directory.h"

#include <fcntl.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/files/durable_file.h"
#include "quern/error.h"

namespace quern {

namespace fs = std::filesystem;

HeldDirectory::HeldDirectory(int directory, std::string name)
    : name_(std::move(name)), directory_(::fcntl(directory, F_DUPFD_CLOEXEC, 0)) {
  if (!directory_) fail_resources(name_, "cannot be opened again", errno);
  path_ = "/proc/self/fd/" + std::to_string(directory_.get());
  std::error_code none;
  if (!fs::equivalent(path_, name_, none)) path_ = name_;  // there is no /proc
}

std::string HeldDirectory::write(const std::function<std::string(const std::string& directory)>& work) const {
  try {
    return named(work(path_));
  } catch (const Error& error) {
    ErrorDetail detail = error.detail();
    detail.where = named(detail.where);
    throw Error(error.code(), std::move(detail));
  }
}

std::string HeldDirectory::named(const std::string& path) const {
  if (!path.starts_with(path_)) return path;
  std::error_code none;
  const bool moved = path_ != name_ && !fs::equivalent(path_, name_, none);
  const fs::path now = moved ? fs::read_symlink(path_, none) : fs::path(name_);
  return (none || now.empty() ? name_ : now.string()) + path.substr(path_.size());
}

}  // namespace quern
