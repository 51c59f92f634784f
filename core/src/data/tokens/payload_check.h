#pragma once
// Proves what the headers of a run's token files promise, the checksums of their payloads: once, behind training, so
// that no step waits for it.

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "data/tokens/token_file.h"

namespace quern {

class PayloadCheck {
 public:
  /// Files of up to 16 MiB in all are read here, and what is wrong is thrown; more by a thread. Files outlive this.
  explicit PayloadCheck(std::vector<const TokenFile*> files);
  /// Does not wait for files that are not read yet.
  ~PayloadCheck();

  /// Throws what was found wrong so far.
  void rethrow() const;

 private:
  void run();

  std::vector<const TokenFile*> files_;
  std::atomic<bool> stopping_ = false;
  mutable std::mutex mutex_;
  std::exception_ptr fault_;
  std::thread thread_;
};

}  // namespace quern
