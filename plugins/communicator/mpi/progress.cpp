#include "progress.h"

#include <chrono>

namespace quern::mpi {

namespace {

constexpr std::chrono::milliseconds kListen{20};  // how often who has nothing to do hears of faults

}  // namespace

void Progress::post(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
  changed_.notify_all();
}

void Progress::wait(std::uint64_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= count; });
}

void Progress::run(const std::stop_token& stop) {
  bool told = false;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait_for(lock, stop, kListen, [&] { return !work_.empty(); });
    if (!work_.empty()) {
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
      if (!wire_.failed()) continue;
    }
    lock.unlock();
    wire_.look();
    if (wire_.failed() && !told) wire_.tell(), told = true;
    lock.lock();
    if (stop.stop_requested() && work_.empty()) return;
  }
}

}  // namespace quern::mpi
