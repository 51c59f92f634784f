#pragma once
// A folder that only the user can enter, in which ranks of one machine meet. A lock on it says that its owner lives, so
// that files of killed owners can be recognized, and removed.

#include <filesystem>

#include "base/files/descriptor.h"

namespace quern {

class RankFolder {
 public:
  /// A resources error where none can be made.
  RankFolder();
  /// Removes it, with all its contents.
  ~RankFolder();
  RankFolder(const RankFolder&) = delete;
  RankFolder& operator=(const RankFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  /// Removes this user's folders whose owners are gone.
  static void remove_left() noexcept;

 private:
  std::filesystem::path path_;
  OwnedDescriptor lock_;
};

}  // namespace quern
