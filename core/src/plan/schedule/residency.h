#pragma once
// Residency, a pass over schedules: what launches read and write is where they need it. A value that lives in an
// offload store is fetched into a slot of the arena ahead of the window of launches that uses it, and put back behind
// it. One of which each rank has a part is gathered there, and a gradient is summed over the ranks into their parts
// behind it. What lives on the device, or in a store in which kernels work in place, stays where it is.

#include <cstdint>

#include "plan/schedule.h"

namespace quern {

/// A ring, at offset 0, of the size of any window, the `ahead` that follow it, and the one before it if windows are put
/// back; without bytes when the schedules use no store. `alignment` is of every value.
SlotRing ring_for(const ScheduleSet& set, std::int64_t alignment, int ahead, SpareBytes spare = {});

/// Bytes of the values that no run writes and more than one window of a run reads, of the run that has most of them:
/// with so many `kept`, each is fetched or gathered once a run.
std::int64_t reused_bytes(const ScheduleSet& set, std::int64_t alignment, const SpareBytes& spare = {});

/// Fetches, gathers, puts back and reduces, in every schedule; ahead as far as there is room in the ring. Launches and
/// collectives of one Action::window are one window; one without a number uses no store. What a window puts itself
/// stays as it is.
void make_resident(ScheduleSet& set, const SlotRing& ring, std::int64_t alignment);

}  // namespace quern
