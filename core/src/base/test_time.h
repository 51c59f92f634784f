#pragma once
// How long an action takes, for tests of how time grows with size.

#include <algorithm>
#include <ctime>
#include <functional>

namespace quern {

/// Seconds of this process's own time, the shortest of a few runs: what else the machine does counts little.
inline double seconds_of(const std::function<void()>& action) {
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    const std::clock_t begin = std::clock();
    action();
    best = std::min(best, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
  return best;
}

}  // namespace quern
