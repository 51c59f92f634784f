#pragma once
// A fresh folder for one contract, removed with it.

#include <cstdlib>
#include <filesystem>
#include <string>

#include "quern/error.h"

namespace quern::conformance {

class Scratch {
 public:
  Scratch() {
    std::string name = std::filesystem::temp_directory_path() / "quern-check-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr)
      throw Error(ErrorCode::resources,
                  {.where = name, .what = "cannot be made", .next = "set TMPDIR to a folder that can be written"});
    path_ = name;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace quern::conformance
