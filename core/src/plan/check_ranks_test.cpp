// Ranks whose collectives do not meet: in another order, of another size, or behind an event that never comes.
#include <doctest/doctest.h>

#include "plan/check_schedules.h"

using namespace quern;

namespace {

/// Gathers on the communication lane, each behind a product on the compute lane.
struct Rank {
  ScheduleSet set;
  RunSchedule& schedule = set[Run::first];

  explicit Rank(const std::vector<std::int64_t>& sizes) {
    schedule.name = "first micro-step";
    for (std::int64_t size : sizes) {
      const Operand slab{.dtype = DType::bf16, .extents = {size}, .present = true};
      set.tasks.push_back({.instance = {.kind = "all_gather", .outputs = {slab}, .geometry = {}}, .name = "gather"});
      const std::int32_t event = schedule.events++;
      schedule.add({.kind = ActionKind::record, .event = event}, {}, {});
      schedule.add({.kind = ActionKind::wait, .lane = Lane::communication, .event = event}, {}, {});
      schedule.add({.kind = ActionKind::collective,
                    .lane = Lane::communication,
                    .task = static_cast<std::int32_t>(set.tasks.size() - 1)},
                   {}, {});
    }
  }
};

std::vector<std::string> faults(const std::vector<const Rank*>& ranks) {
  std::vector<const ScheduleSet*> sets;
  for (const Rank* rank : ranks) sets.push_back(&rank->set);
  return rank_faults(sets, Run::first);
}

}  // namespace

TEST_CASE("ranks that make the same collectives in the same order meet") {
  const Rank a({64, 128}), b({64, 128}), c({64, 128});
  CHECK(faults({&a, &b, &c}).empty());
  CHECK(faults({&a}).empty());
}

TEST_CASE("another order or size is named with its rank") {
  const Rank a({64, 128}), b({128, 64});
  CHECK(faults({&a, &a, &b}) ==
        std::vector<std::string>{
            "first micro-step, rank 2: makes all_gather bf16 (128) where rank 0 makes all_gather bf16 (64)"});
}

TEST_CASE("a rank that makes one collective less leaves the others waiting") {
  const Rank a({64, 128}), b({64});
  CHECK(faults({&a, &b}) ==
        std::vector<std::string>{"first micro-step, rank 0: communication never gets past all_gather bf16 (128)"});
}

TEST_CASE("lanes that wait for each other never end") {
  Rank a({64});
  a.schedule.events = 3;
  a.schedule.actions.clear();
  a.schedule.add({.kind = ActionKind::wait, .event = 2}, {}, {});
  a.schedule.add({.kind = ActionKind::record, .event = 1}, {}, {});
  a.schedule.add({.kind = ActionKind::wait, .lane = Lane::communication, .event = 1}, {}, {});
  a.schedule.add({.kind = ActionKind::record, .lane = Lane::communication, .event = 2}, {}, {});
  CHECK(faults({&a}) ==
        std::vector<std::string>{"first micro-step, rank 0: compute never gets past wait of event 2",
                                 "first micro-step, rank 0: communication never gets past wait of event 1"});
}
