#pragma once
// A directory that stays the same one while files are written into it, wherever it is moved meanwhile.

#include <functional>
#include <string>

#include "base/files/descriptor.h"

namespace quern {

class HeldDirectory {
 public:
  /// Of a directory that is open; `name` leads to it now. A resources error where no descriptor is free.
  HeldDirectory(int directory, std::string name);

  /// Calls `work` with a path of the directory that a move does not change, and returns what `work` does, a path in it,
  /// by the name that the directory has then. Errors of `work` use that name too.
  std::string write(const std::function<std::string(const std::string& directory)>& work) const;

 private:
  std::string named(const std::string& path) const;

  std::string name_, path_;
  OwnedDescriptor directory_;
};

}  // namespace quern
