#pragma once
// Order between lanes, a pass over schedules: actions of two lanes that touch the same bytes, one of them writing, get
// an event between them. No other pass says what waits for what.

#include "plan/schedule.h"

namespace quern {

/// Adds records and waits to every schedule, which has none, for what its own actions need of each other and of any run
/// before it. Launches of one Action::window wait together, and are waited for together, so that they can be one graph.
/// The compute lane ends each run behind the communication lane, so that the host may read what that made.
void synchronize(ScheduleSet& set);

}  // namespace quern
