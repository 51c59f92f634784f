#pragma once
// What ranks do together beside programs: gathers, reductions and sums, on a lane of their own, so that programs go on
// meanwhile.

#include "plan/plan.h"
#include "plan/schedule/order.h"
#include "plan/schedule/places.h"

namespace quern {

/// Adds what ranks do at a stop of the order.
void add_collectives(const Plan& plan, ScheduleSet& set, Places& places, RunSchedule& schedule, const Stop& stop);

/// Where the part of a tensor over ranks is, and what brings the parts together or sums them.
void add_over_ranks(const Plan& plan, ScheduleSet& set, Places& places, const PlannedTensor& whole);

}  // namespace quern
