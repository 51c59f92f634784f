// Time over lanes: what may overlap does, and what waits does not.
#include "plan/time/simulate.h"

#include <tuple>
#include <utility>

#include <doctest/doctest.h>

using namespace quern;

TEST_CASE("lanes run side by side until an event orders them") {
  ScheduleSet set;
  set.tasks.push_back({.instance = {.kind = "work", .geometry = {}}, .name = "work"});
  set.tasks[0].seconds = 1;
  DeviceTraits device;
  device.host_rate = 50;
  RunSchedule schedule{.name = "test", .events = 1};
  const Access staged{{Space::staging, 0, 0, 100}, 0}, here{{Space::device, 0, 0, 100}, 1};
  schedule.add({.kind = ActionKind::copy, .lane = Lane::copy_in}, std::span(&staged, 1), std::span(&here, 1));  // 2 s
  schedule.add({.kind = ActionKind::record, .lane = Lane::copy_in, .event = 0}, {}, {});
  schedule.add({.kind = ActionKind::launch, .task = 0}, {}, {});  // 1 s, beside it
  schedule.add({.kind = ActionKind::wait, .event = 0}, {}, {});
  schedule.add({.kind = ActionKind::launch, .task = 0}, {}, {});
  const std::vector<ActionTime> times = simulate(set, schedule, device);
  CHECK(times[0].end == 2);
  CHECK(times[2].begin == 0);
  CHECK(times[2].end == 1);
  CHECK(times[4].begin == 2);
  CHECK(simulated_seconds(set, schedule, device) == 3);
  CHECK(simulated_seconds(set, RunSchedule{}, device) == 0);
}

TEST_CASE("a collective takes the bytes that cross a rank's links, beside launches, and an all_reduce twice as many") {
  const Operand part{.dtype = DType::f32, .extents = {10}, .present = true},
      whole{.dtype = DType::f32, .extents = {40}, .present = true};
  auto seconds = [&](const char* kind, const Operand& in, const Operand& out, std::int64_t ranks, double rate) {
    ScheduleSet set;
    set.tasks.push_back(
        {.instance = {.kind = kind, .inputs = {in}, .outputs = {out}, .attributes = {{"ranks", ranks}}, .geometry = {}},
         .name = kind});
    set.tasks.push_back({.instance = {.kind = "work", .geometry = {}}, .name = "work", .seconds = 1});
    RunSchedule schedule{.name = "test"};
    schedule.add({.kind = ActionKind::collective, .lane = Lane::communication, .task = 0}, {}, {});
    schedule.add({.kind = ActionKind::launch, .task = 1}, {}, {});  // 1 s
    DeviceTraits device;
    device.peer_rate = rate;
    return simulated_seconds(set, schedule, device);
  };
  CHECK(seconds("all_gather", part, whole, 4, 40) == 3);
  CHECK(seconds("reduce_scatter", whole, part, 4, 40) == 3);
  CHECK(seconds("all_reduce", whole, whole, 4, 40) == 6);
  CHECK(seconds("all_reduce", whole, whole, 1, 40) == 1);
  CHECK(seconds("all_reduce", whole, whole, 4, 0) == 1);  // a rate that is not known
}

TEST_CASE("a transfer takes its bytes once over the link, in both directions, and twice inside the device") {
  ScheduleSet set;
  DeviceTraits device;
  device.memory_rate = 100;
  device.host_rate = 50;
  const Access stored{{Space::store, 0, 0, 100}, 0}, here{{Space::device, 0, 0, 100}, 1},
      there{{Space::device, 0, 100, 100}, 2}, result{{Space::results, 0, 0, 100}, 3};
  auto alone = [&](ActionKind kind, const Access& from, const Access& to) {
    RunSchedule schedule{.name = "test"};
    schedule.add({.kind = kind}, std::span(&from, 1), std::span(&to, 1));
    return simulated_seconds(set, schedule, device);
  };
  CHECK(alone(ActionKind::get, stored, here) == 2);
  CHECK(alone(ActionKind::put, here, stored) == 2);
  CHECK(alone(ActionKind::copy, here, result) == 2);
  CHECK(alone(ActionKind::copy, here, there) == 2);
  CHECK(alone(ActionKind::fill, here, there) == 1);
}

TEST_CASE("a store slower than the link takes its own time for each direction and leaves the link to others") {
  ScheduleSet set;
  set.rates = {{}, {.put = 10, .get = 20}, {.put = 1000, .get = 1000}};
  DeviceTraits device;
  device.host_rate = 50;
  device.duplex_rate = 25;
  const Access here{{Space::device, 0, 0, 100}, 0};
  auto in = [](std::int32_t store) { return Access{{Space::store, store, 0, 100}, 1}; };
  auto get = [&](RunSchedule& schedule, const Access& from) {
    schedule.add({.kind = ActionKind::get, .lane = Lane::copy_in}, std::span(&from, 1), std::span(&here, 1));
  };
  auto put = [&](RunSchedule& schedule, const Access& to) {
    schedule.add({.kind = ActionKind::put, .lane = Lane::copy_out}, std::span(&here, 1), std::span(&to, 1));
  };
  for (const auto& [store, get_seconds, put_seconds] : {std::tuple(0, 2, 2), {1, 5, 10}, {2, 2, 2}}) {
    RunSchedule gets{.name = "gets"}, puts{.name = "puts"};
    get(gets, in(store));
    put(puts, in(store));
    CHECK(simulated_seconds(set, gets, device) == get_seconds);
    CHECK(simulated_seconds(set, puts, device) == put_seconds);
  }
  RunSchedule both{.name = "both"};
  get(both, in(0));
  put(both, in(1));
  const std::vector<ActionTime> times = simulate(set, both, device);
  CHECK(times[0].end == 2);
  CHECK(times[1].end == 10);
}

TEST_CASE("a launch that works in a store takes the bytes over the link, where these take longer than it") {
  ScheduleSet set;
  set.tasks.push_back({.instance = {.kind = "work", .geometry = {}}, .name = "work", .seconds = 2});
  const Access one{{Space::store, 0, 0, 100}, 0}, two{{Space::store, 0, 100, 300}, 1},
      here{{Space::device, 0, 0, 900}, 2};
  DeviceTraits device;
  device.host_rate = 100;
  device.duplex_rate = 50;
  auto alone = [&](std::vector<Access> reads, std::vector<Access> writes) {
    RunSchedule schedule{.name = "test"};
    schedule.add({.task = 0}, reads, writes);
    return simulated_seconds(set, schedule, device);
  };
  CHECK(alone({one, here}, {here}) == 2);
  CHECK(alone({two, here}, {here}) == 3);
  CHECK(alone({one, two}, {here}) == 4);
  CHECK(alone({one, here}, {two}) == 6);  // both directions
  set.tasks[0].changed = {0};
  CHECK(alone({two}, {here}) == 6);
  set.tasks[0].changed = {};
  set.tasks[0].summed = {0};
  CHECK(alone({here}, {two}) == 6);
  set.tasks[0].seconds = 7;
  CHECK(alone({here}, {two}) == 7);
}

TEST_CASE("transfers of both directions slow each other down while they overlap, and transfers of one share it") {
  const Access stored{{Space::store, 0, 0, 100}, 0}, here{{Space::device, 0, 0, 100}, 1},
      there{{Space::device, 0, 100, 300}, 2}, put_back{{Space::store, 0, 100, 300}, 3};
  auto ends = [&](double duplex_rate, Lane second, const Access& from, const Access& to) {
    DeviceTraits device;
    device.host_rate = 100;
    device.duplex_rate = duplex_rate;
    RunSchedule schedule{.name = "test"};
    schedule.add({.kind = ActionKind::get, .lane = Lane::copy_in}, std::span(&stored, 1), std::span(&here, 1));
    schedule.add({.kind = ActionKind::copy, .lane = second}, std::span(&from, 1), std::span(&to, 1));
    const std::vector<ActionTime> times = simulate({}, schedule, device);
    return std::pair(times[0].end, times[1].end);
  };
  CHECK(ends(0, Lane::copy_out, there, put_back) == std::pair(1.0, 3.0));
  CHECK(ends(50, Lane::copy_out, there, put_back) == std::pair(2.0, 4.0));  // two seconds beside it, then alone
  CHECK(ends(50, Lane::compute, stored, here) == std::pair(2.0, 2.0));
}
