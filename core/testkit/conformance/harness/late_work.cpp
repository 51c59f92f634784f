#include "conformance/harness/late_work.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

namespace quern::conformance {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPatience{200};  // longer than a busy machine delays a thread

}  // namespace

struct LateWork::State {
  std::chrono::duration<double> longest;
  std::mutex lock;
  std::condition_variable changed;
  bool ended = false, gave_up = false;
  std::optional<Clock::time_point> awaited_since;

  void run() {
    std::unique_lock guard(lock);
    const Clock::time_point latest = Clock::now() + std::chrono::duration_cast<Clock::duration>(longest);
    while (!ended) {
      const Clock::time_point until = awaited_since ? std::min(latest, *awaited_since + kPatience) : latest;
      gave_up = ended = Clock::now() >= until;
      if (!ended) changed.wait_until(guard, until);
    }
  }
  template <class Change>
  void change(Change apply) {
    const std::lock_guard guard(lock);
    apply();
    changed.notify_all();
  }
};

LateWork::LateWork(Device& device, Stream stream, double longest) : state_(std::make_shared<State>()) {
  state_->longest = std::chrono::duration<double>(longest);
  device.call([state = state_] { state->run(); }, stream);
}

void LateWork::during(const std::function<void()>& wait) {
  state_->change([&] { state_->awaited_since = Clock::now(); });
  wait();
  state_->change([&] { state_->awaited_since.reset(); });
}

void LateWork::end() {
  state_->change([&] { state_->ended = true; });
}

bool LateWork::gave_up() const {
  const std::lock_guard guard(state_->lock);
  return state_->gave_up;
}

}  // namespace quern::conformance
