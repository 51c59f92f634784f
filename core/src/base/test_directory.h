#pragma once
// A fresh directory for one test, removed with it.

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>

namespace quern {

class TestDirectory {
 public:
  TestDirectory() {
    std::string name = std::filesystem::temp_directory_path() / "quern-test-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + name);
    path_ = name;
  }
  ~TestDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestDirectory(const TestDirectory&) = delete;
  TestDirectory& operator=(const TestDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  /// How many entries it has, hidden ones included.
  auto entries() const { return std::distance(std::filesystem::directory_iterator(path_), {}); }

 private:
  std::string path_;
};

}  // namespace quern
