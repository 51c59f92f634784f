#pragma once
// The open files of a list that may be longer than the limit on open files: those used last stay open, others are
// opened again when they are read.

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "base/files/input_file.h"

namespace quern {

class OpenFiles {
 public:
  /// At most `most` are open at once, besides those that a caller still holds.
  explicit OpenFiles(std::size_t most = default_most()) : most_(most) {}
  /// 256, or an eighth of what the process may have open where that is less.
  static std::size_t default_most();

  /// The file of that path, as it was when it was first opened here: an input error when it was replaced or rewritten
  /// while it was closed. Safe to call from several threads.
  std::shared_ptr<const InputFile> open(const std::string& path);

 private:
  struct Entry {
    std::shared_ptr<const InputFile> file;         ///< null: closed
    std::list<const std::string*>::iterator used;  ///< of an open one
    std::optional<InputFile::Stamp> stamp;         ///< when it was first opened
  };
  void close_last();

  std::size_t most_;
  std::mutex mutex_;
  std::unordered_map<std::string, Entry> files_;
  std::list<const std::string*> used_;  ///< keys of open files, the last used first
};

}  // namespace quern
