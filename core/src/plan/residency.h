#pragma once
// Residency, a pass over schedules: what launches read and write is where they need it. A value that lives in an
// offload store is fetched into a slot of the arena ahead of the window of launches that uses it, and put back behind
// it. Where everything lives on the device the pass changes nothing.

#include <cstdint>

#include "plan/schedule.h"

namespace quern {

/// The slots that windows take by turns, one after the other in the arena.
struct SlotRing {
  std::int64_t offset = 0;  ///< in the arena
  std::int64_t slot_bytes = 0;
  int slots = 0;  ///< at least ahead + 1; one more lets a window be put back while the next one is fetched
  int ahead = 1;  ///< windows that are fetched before the one that runs
  std::int64_t bytes() const { return slot_bytes * slots; }
};

/// The ring that the schedules need, at offset 0; without slots when they use no store. `alignment` is of every value.
SlotRing ring_for(const ScheduleSet& set, std::int64_t alignment, int ahead);

/// Fetches and puts back, in every schedule. Launches and collectives of one Action::window are one window; one
/// without a number uses no store.
void make_resident(ScheduleSet& set, const SlotRing& ring, std::int64_t alignment);

}  // namespace quern
