#pragma once
// Poison, a pass over schedules for tests: what a run has no more use for becomes 0xFF, which is NaN in all floating
// formats and -1 in integers. A run that reads what it should not have then shows it in its bits.

#include "plan/schedule.h"

namespace quern {

/// Fills the bytes of each value that does not outlive its run behind the last action that uses it, on that action's
/// lane, and each workspace behind its launch. An output that took over the memory of its input is not poisoned. Nor
/// are values in stores, and values whose last uses may run at the same time. The pass adds no order between lanes, and
/// schedules that keep the rules still do.
void poison_freed(ScheduleSet& set);

}  // namespace quern
