#pragma once
// How long this process has waited, without time in which it was stopped (Ctrl-Z, a suspended machine).

#include <algorithm>
#include <chrono>

namespace quern {

class RunningTime {
 public:
  /// Seconds since construction. Call it several times a second: after a longer pause the process was stopped, and only
  /// one second counts.
  double look() {
    constexpr double kLongestPause = 1;
    const Clock::time_point time = Clock::now();
    seconds_ += std::min(std::chrono::duration<double>(time - last_).count(), kLongestPause);
    last_ = time;
    return seconds_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
  double seconds_ = 0;
};

}  // namespace quern
