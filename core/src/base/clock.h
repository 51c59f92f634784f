#pragma once
// Seconds of a clock that never jumps, for durations.

#include <chrono>

namespace quern {

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace quern
