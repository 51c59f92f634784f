#pragma once
// Writes out the order of programs as schedules: every launch, copy and collective of every run, with its places.

#include <functional>

#include "plan/plan.h"

namespace quern {

ScheduleSet make_schedules(const Plan& plan);
/// Of these runs alone.
ScheduleSet make_schedules(const Plan& plan, const std::function<bool(const Run&)>& wanted);

/// Only those that any other's windows are in, to know how large slots must be.
ScheduleSet make_largest_schedules(const Plan& plan);

}  // namespace quern
