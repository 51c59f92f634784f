#pragma once
// The file in the user's cache directory that keeps timed choices between processes. Each entry carries a checksum and
// the file its schema: damaged entries are passed over, files of an earlier schema are replaced, and files of a later
// quern are not touched. A lock beside it lets one process at a time measure and write; others then find what it found.

#include <map>
#include <string>

namespace quern::cuda {

class ChoiceFile {
 public:
  using Choices = std::map<std::string, std::string>;

  /// {"schema": 2, "choices": {owner: {what: [choice, checksum]}}}
  static constexpr int kSchema = 2;

  /// An empty path: no file, nothing is kept and nothing locked.
  explicit ChoiceFile(std::string path) : path_(std::move(path)) {}

  /// Whole entries of that owner. A missing or bad file is an empty one.
  Choices read(const std::string& owner) const;
  /// Adds one to the file's present entries; the file is replaced as a whole. To be called under the lock. A cache:
  /// faults are ignored.
  void add(const std::string& owner, const std::string& what, const std::string& choice) const noexcept;

  /// Held until it is destroyed.
  class Lock {
   public:
    explicit Lock(int descriptor) : descriptor_(descriptor) {}
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    explicit operator bool() const { return descriptor_ >= 0; }

   private:
    int descriptor_;
  };
  /// Waits for another process that has it, up to a minute in all: a stopped one must not stop others. Empty where it
  /// cannot be had; then work goes on without.
  Lock lock();

 private:
  std::string path_;
  bool may_wait_ = true;
};

}  // namespace quern::cuda
