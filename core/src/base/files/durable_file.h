#pragma once
// Files and directories that appear whole or not at all, also across a crash: write beside the final name, fsync,
// rename, fsync the directory. Every failure is a resources error with the path and the system's words.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/checksum.h"

namespace quern {

/// Names that start so are unfinished and may be deleted by whoever holds the run's lock.
inline constexpr std::string_view kTemporaryPrefix = ".tmp-";

/// Size and checksum of a finished file.
struct FileRecord {
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
  bool operator==(const FileRecord&) const = default;
};

/// A file under construction; until `commit`, `path` keeps what it held before.
class DurableFile {
 public:
  explicit DurableFile(std::string path);
  /// Removes the written bytes when `commit` was not reached.
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Makes the file durable at its final name.
  FileRecord commit();

 private:
  std::string path_, temporary_;
  int file_ = -1;
  Checksum checksum_;
  std::uint64_t bytes_ = 0;
};

/// Creates `path` and its missing parents, durably.
void make_directories(const std::string& path);
/// Calls `work` with the name of `path` while it is unfinished, in the same directory. Errors that name a file in it
/// give its name in `path`.
void in_unfinished(const std::string& path, const std::function<void(const std::string& temporary)>& work);

/// A directory that appears whole or not at all: it is filled under its unfinished name, and then takes the place of an
/// older `path`.
class NewDirectory {
 public:
  /// Makes it, empty, and missing parents.
  explicit NewDirectory(std::string path);
  /// Removes it where it is not in place.
  ~NewDirectory();
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;

  const std::string& path() const { return path_; }
  void fill(const std::function<void(const std::string& temporary)>& work) { in_unfinished(path_, work); }
  void put_in_place();

 private:
  const std::string path_, temporary_;
};

/// Makes directory `path` whole or not at all, by `fill`.
void write_directory(const std::string& path, const std::function<void(const std::string& temporary)>& fill);
/// Creates the directory if need be, and proves that files can be written there by writing one. A resources error
/// otherwise.
void check_writable(const std::string& directory);
/// Moves directory `from` to the name `to`, in the same directory; an older `to` is replaced, atomically where the file
/// system can exchange names, and removed afterwards.
void replace_directory(const std::string& from, const std::string& to);
/// Of a directory that replace_directory had moved aside when the process was killed: gives it its name again, where
/// nothing has that by now. False: `path` is no such directory.
bool restore_replaced(const std::string& path);
/// Removes a file or a whole directory, links not followed; absent is fine.
void remove_tree(const std::string& path);
/// Removes the files of a directory whose names begin and end so; what cannot be removed stays.
void remove_named(const std::string& directory, std::string_view begin, std::string_view end) noexcept;

/// Throws a resources error with the words for `error_number`.
[[noreturn]] void fail_resources(const std::string& path, const std::string& what, int error_number);

}  // namespace quern
