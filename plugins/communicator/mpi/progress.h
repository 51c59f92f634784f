#pragma once
// The thread that moves messages while streams copy: one piece of work after another, in the order of the streams. When
// it has none it listens to peers.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "wire.h"

namespace quern::mpi {

class Progress {
 public:
  /// The wire outlives this.
  explicit Progress(Wire& wire) : wire_(wire), thread_([this](const std::stop_token& stop) { run(stop); }) {}
  /// Finishes the posted work first.
  ~Progress() = default;

  void post(std::function<void()> work);
  /// Blocks until as many pieces of work are done.
  void wait(std::uint64_t count);

 private:
  void run(const std::stop_token& stop);

  Wire& wire_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::function<void()>> work_;
  std::uint64_t done_ = 0;
  std::jthread thread_;  // the last member: ends first
};

}  // namespace quern::mpi
