#pragma once
// Writes out the order of programs as schedules: every launch, copy and collective of every run, with its places.

#include <functional>
#include <string_view>

#include "plan/plan.h"

namespace quern {

/// The op of programs that is a collective: the sum of its operand over the ranks of an axis, all or with the attribute
/// `axis` = "machine" this machine's. The device needs no kernel.
inline constexpr std::string_view kAllReduce = "all_reduce";

ScheduleSet make_schedules(const Plan& plan);
/// Of these runs alone.
ScheduleSet make_schedules(const Plan& plan, const std::function<bool(const Run&)>& wanted);

/// To know how large slots must be: of the runs those that any other's windows are in, of their programs those that use
/// slots.
ScheduleSet make_slot_schedules(const Plan& plan);

}  // namespace quern
