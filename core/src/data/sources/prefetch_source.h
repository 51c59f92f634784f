#pragma once
// Reads ahead: another source's batches, made by a thread of its own and double-buffered. Batches, saved positions and
// errors are the wrapped source's; only the waiting goes away.

#include <array>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "quern/data_source.h"

namespace quern {

class PrefetchSource : public DataSource {
 public:
  explicit PrefetchSource(std::unique_ptr<DataSource> inner);
  ~PrefetchSource() override;

  std::int64_t vocabulary() const override { return vocabulary_; }
  std::int64_t epoch_tokens() const override { return epoch_tokens_; }
  /// Rethrows what the wrapped source threw for this batch; again at every call until `load_state`.
  void next(Batch& batch) override;
  /// Of the batch that `next` returns next, not of the one being read ahead.
  std::string save_state() const override;
  void load_state(const std::string& state) override;

 private:
  struct Slot {
    Batch batch;
    std::string state;  ///< before the batch was taken
    std::exception_ptr error;
  };
  void start();
  void stop();
  void run();
  void wait_ready(std::unique_lock<std::mutex>& lock) const;

  std::unique_ptr<DataSource> inner_;  ///< the thread's alone while it runs
  std::int64_t vocabulary_, epoch_tokens_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // Slots head_ .. head_ + ready_ - 1 (modulo 2) belong to the caller, the others to the thread.
  std::array<Slot, 2> slots_;
  std::size_t head_ = 0, ready_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace quern
