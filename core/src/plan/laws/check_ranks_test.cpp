// Ranks whose collectives do not meet: in another order, of another size, or behind an event that never comes.
#include <doctest/doctest.h>

#include "plan/laws/check_schedules.h"

using namespace quern;

namespace {

/// Gathers on the communication lane, each behind a matmul on the compute lane.
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
  return rank_faults(sets);
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

TEST_CASE("a collective among the ranks of a machine does not meet one among all") {
  const Rank a({64});
  Rank b({64});
  b.set.tasks[0].axis = Axis::machine;
  CHECK(faults({&b, &b}).empty());
  CHECK(faults({&a, &b}) ==
        std::vector<std::string>{"first micro-step, rank 1: makes all_gather of a machine bf16 (64) "
                                 "where rank 0 makes all_gather bf16 (64)"});
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

TEST_CASE("a rank that gathers from another place than its part of the whole, or outside the arena, is named") {
  auto gathering = [](std::int64_t from, std::int64_t to, Space space) {
    Rank rank({});
    const Operand part{.dtype = DType::bf16, .extents = {32}, .present = true},
        whole{.dtype = DType::bf16, .extents = {64}, .present = true};
    rank.set.tasks.push_back({.instance = {.kind = "all_gather",
                                           .inputs = {part},
                                           .outputs = {whole},
                                           .attributes = {{"counts", std::vector<double>{32, 32}}},
                                           .geometry = {}},
                              .name = "gather"});
    const Access read{{space, 0, from, 64}, 0}, written{{space, 0, to, 128}, 0};
    rank.schedule.add({.kind = ActionKind::collective, .lane = Lane::communication, .task = 0}, {&read, 1},
                      {&written, 1});
    return rank;
  };
  const Rank a = gathering(256, 256, Space::device), b = gathering(320, 256, Space::device);
  CHECK(faults({&a, &b}).empty());
  CHECK(faults({&a, &a}) == std::vector<std::string>{"first micro-step, rank 1: all_gather bf16 (64) at 256 has its "
                                                     "part at 256, and in the whole it is at 320"});
  const Rank c = gathering(384, 320, Space::device);
  CHECK(faults({&a, &c}) ==
        std::vector<std::string>{"first micro-step, rank 1: makes all_gather bf16 (64) at 320 where "
                                 "rank 0 makes all_gather bf16 (64) at 256"});
  const Rank d = gathering(256, 256, Space::staging);
  CHECK(faults({&d}) ==
        std::vector<std::string>{"first micro-step, rank 0: all_gather bf16 (64) at 256 works in staging, "
                                 "which other ranks cannot reach"});
}
