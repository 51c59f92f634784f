#include "base/files/durable_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "base/files/descriptor.h"
#include "quern/error.h"

namespace quern {

namespace fs = std::filesystem;

namespace {

std::string parent_of(const std::string& path) {
  std::string parent = fs::path(path).parent_path();
  return parent.empty() ? "." : parent;
}

/// Ends the name of a directory that is being replaced.
constexpr std::string_view kReplaced = "-old";

std::string unfinished_name(const std::string& path) {
  fs::path final_path(path);
  return final_path.parent_path() / (std::string(kTemporaryPrefix) + final_path.filename().string());
}

const char* next_step(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT: return "free disk space or choose another directory";
    case EFBIG: return "raise the limit on file sizes (ulimit -f) or choose another directory";
    case EACCES:
    case EPERM:
    case EROFS: return "choose a directory that this user can write";
    case EMFILE: return "raise the limit on open files: ulimit -n";
    default: return "";
  }
}

/// Makes the entries of a directory durable.
void sync_directory(const std::string& path) {
  int directory = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) fail_resources(path, "directory cannot be opened", errno);
  int failed = ::fsync(directory);
  int reason = errno;
  ::close(directory);
  // Some network file systems cannot sync directories and say EINVAL.
  if (failed != 0 && reason != EINVAL) fail_resources(path, "directory cannot be made durable", reason);
}

}  // namespace

void fail_resources(const std::string& path, const std::string& what, int error_number) {
  throw Error(ErrorCode::resources, {path, what, std::strerror(error_number), "", next_step(error_number)});
}

DurableFile::DurableFile(std::string path) : path_(std::move(path)), temporary_(unfinished_name(path_)) {
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (file_ < 0) fail_resources(path_, "cannot be created", errno);
}

DurableFile::~DurableFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void DurableFile::write(std::span<const std::byte> bytes) {
  checksum_.add(bytes);
  bytes_ += bytes.size();
  if (!write_all(file_, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}))
    fail_resources(path_, "cannot be written", errno);
}

FileRecord DurableFile::commit() {
  if (::fsync(file_) != 0) fail_resources(path_, "cannot be made durable", errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_resources(path_, "cannot be put in place", errno);
  int closed = ::close(std::exchange(file_, -1));
  if (closed != 0) fail_resources(path_, "cannot be closed", errno);
  sync_directory(parent_of(path_));
  return {bytes_, checksum_.value()};
}

void make_directories(const std::string& path) {
  std::error_code error;
  std::vector<std::string> parents;  // of those that are new, the innermost first
  for (fs::path missing = path; !missing.empty() && !fs::exists(missing, error); missing = missing.parent_path())
    parents.push_back(parent_of(missing));
  fs::create_directories(path, error);
  if (error) fail_resources(path, "directory cannot be created", error.value());
  if (!fs::is_directory(path, error)) fail_resources(path, "directory cannot be created", ENOTDIR);
  for (const std::string& parent : parents) sync_directory(parent);
}

void in_unfinished(const std::string& path, const std::function<void(const std::string& temporary)>& work) {
  const std::string temporary = unfinished_name(path);
  try {
    work(temporary);
  } catch (const Error& error) {
    ErrorDetail detail = error.detail();
    if (detail.where.starts_with(temporary)) detail.where.replace(0, temporary.size(), path);
    throw Error(error.code(), std::move(detail));
  }
}

NewDirectory::NewDirectory(std::string path) : path_(std::move(path)), temporary_(unfinished_name(path_)) {
  make_directories(parent_of(path_));
  fill([](const std::string& temporary) {
    remove_tree(temporary);
    make_directories(temporary);
  });
}

NewDirectory::~NewDirectory() {
  std::error_code ignored;  // the first fault is the one to report
  fs::remove_all(temporary_, ignored);
}

void NewDirectory::put_in_place() {
  fill([this](const std::string& temporary) { replace_directory(temporary, path_); });
}

void write_directory(const std::string& path, const std::function<void(const std::string& temporary)>& fill) {
  NewDirectory directory(path);
  directory.fill(fill);
  directory.put_in_place();
}

void check_writable(const std::string& directory) {
  make_directories(directory);
  const std::string name = directory + "/" + std::string(kTemporaryPrefix) + "probe";
  try {
    DurableFile probe(name);
    probe.write(std::string(4096, '.'));  // a block: a name alone fits on a full disk
    probe.commit();
    remove_tree(name);
  } catch (const Error& error) {
    ErrorDetail detail = error.detail();
    throw Error(error.code(), {directory, "no file can be written there", detail.found, "", detail.next});
  }
}

bool restore_replaced(const std::string& path) {
  const std::string name = fs::path(path).filename();
  if (!name.starts_with(kTemporaryPrefix) || !name.ends_with(kReplaced)) return false;
  const std::size_t length = name.size() - kTemporaryPrefix.size() - kReplaced.size();
  const std::string own = fs::path(path).parent_path() / name.substr(kTemporaryPrefix.size(), length);
  std::error_code absent;
  if (fs::exists(fs::symlink_status(own, absent)) || ::rename(path.c_str(), own.c_str()) != 0) return false;
  sync_directory(parent_of(own));
  return true;
}

void replace_directory(const std::string& from, const std::string& to) {
  std::string old = unfinished_name(to).append(kReplaced);
  std::error_code absent;
  if (!fs::exists(fs::symlink_status(to, absent))) {
    if (::rename(from.c_str(), to.c_str()) != 0) fail_resources(to, "cannot be put in place", errno);
    sync_directory(parent_of(to));
    return;
  }
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
    old = from;
  } else if (errno == EINVAL || errno == ENOSYS) {  // this file system cannot exchange names
    remove_tree(old);
    if (::rename(to.c_str(), old.c_str()) != 0) fail_resources(to, "cannot be moved aside", errno);
    if (::rename(from.c_str(), to.c_str()) != 0) {
      int reason = errno;
      ::rename(old.c_str(), to.c_str());
      fail_resources(to, "cannot be put in place", reason);
    }
  } else {
    fail_resources(to, "cannot be put in place", errno);
  }
  sync_directory(parent_of(to));
  remove_tree(old);
}

void remove_tree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail_resources(path, "cannot be removed", error.value());
}

void remove_named(const std::string& directory, std::string_view begin, std::string_view end) noexcept try {
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename();
    if (name.size() >= begin.size() + end.size() && name.starts_with(begin) && name.ends_with(end))
      ::unlink(entry.path().c_str());
  }
} catch (const std::exception&) {  // they stay
}

}  // namespace quern
