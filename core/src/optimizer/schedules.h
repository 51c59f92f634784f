#pragma once
// Learning-rate schedules. All warm up linearly: step s of a warm-up of w steps has the factor (s + 1) / w, so the
// first step already moves and step w is at the peak. Those that decay give the last step the final fraction exactly.
// A warm-up that leaves no step for that is taken as one of all steps but the last: every run reaches the peak. A run
// of one step is at the peak.

#include <vector>

#include "quern/plugin.h"

namespace quern {

/// The built-in schedules, for the plugin host.
std::vector<Factory> schedule_factories();

}  // namespace quern
