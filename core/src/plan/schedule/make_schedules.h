#pragma once
// Writes out the order of programs as schedules: every launch, copy and collective of every run, with its places.

#include "plan/plan.h"

namespace quern {

ScheduleSet make_schedules(const Plan& plan);

}  // namespace quern
