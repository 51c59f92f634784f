// The rules of schedules, each broken on purpose: by hand over several lanes, and in the schedules of a real plan.
#include "plan/laws/check_schedules.h"

#include <algorithm>

#include <doctest/doctest.h>

#include "plan/test_plans.h"

using namespace quern;

namespace {

/// Two slots of device memory that weights are copied into while the matmul before runs.
struct Windows {
  ScheduleSet set;
  RunSchedule schedule{.name = "windows"};
  static constexpr std::int64_t kBytes = 64;

  std::int32_t value(const std::string& name, bool lasting = false) {
    set.values.push_back(name);
    set.lasting.push_back(lasting);
    return static_cast<std::int32_t>(set.values.size() - 1);
  }
  static Access device(std::int64_t slot, std::int32_t value) {
    return {{Space::device, 0, slot * kBytes, kBytes}, value};
  }
  static Access stored(std::int64_t slot, std::int32_t value) {
    return {{Space::store, 0, slot * kBytes, kBytes}, value};
  }
  void act(Action action, std::vector<Access> reads = {}, std::vector<Access> writes = {}) {
    schedule.add(action, reads, writes);
  }

  /// Weights 0..3 from a store into slots 0 and 1 alternately, a matmul from each. `distance` waits ahead.
  Windows() {
    set.tasks.push_back({.instance = {.kind = "matmul", .geometry = {}}, .name = "matmul"});
    for (int i = 0; i < 4; ++i) {
      const std::int32_t home = value("home " + std::to_string(i), true), here = value("weight " + std::to_string(i)),
                         result = value("y " + std::to_string(i));
      set.held.push_back(stored(i, home));
      const std::int64_t slot = i % 2;
      if (i >= 2) act({.kind = ActionKind::wait, .lane = Lane::copy_in, .event = 10 + i - 2});
      act({.kind = ActionKind::get, .lane = Lane::copy_in}, {stored(i, home)}, {device(slot, here)});
      act({.kind = ActionKind::record, .lane = Lane::copy_in, .event = i});
      act({.kind = ActionKind::wait, .event = i});
      act({.kind = ActionKind::launch, .task = 0}, {device(slot, here)}, {device(2 + i, result)});
      act({.kind = ActionKind::record, .event = 10 + i});
    }
    schedule.events = 14;
    number_versions(set, schedule);
  }

  std::vector<std::string> faults() const {
    ScheduleChecker checker(set);
    for (const Access& access : set.held) checker.hold(access);
    checker.run(schedule);
    return checker.faults();
  }
  std::string first_fault() const {
    const auto found = faults();
    return found.empty() ? "" : found[0];
  }
};

Plan real_plan() {
  PlanOptions options = tiny_options();
  options.next_logits = options.logits = true;
  return tiny_plan(options, PlanningDevice([](const OpInstance& op) {
                     return OpSupport{.workspace_bytes = op.kind == "matmul" ? 512u : 0u};
                   }));
}

}  // namespace

TEST_CASE("a schedule that gets weights ahead, into two slots, keeps the rules") {
  const Windows windows;
  CHECK(windows.faults() == std::vector<std::string>{});
}

TEST_CASE("without a wait a matmul may read a value that is still being copied") {
  Windows windows;
  windows.schedule.actions.erase(windows.schedule.actions.begin() + 2);
  CHECK(windows.first_fault() == "windows, action 2 (matmul): reads `weight 0`, which copy in may still be writing");
}

TEST_CASE("without waiting for the slot a copy may overwrite a value that a matmul still reads") {
  Windows windows;
  auto& actions = windows.schedule.actions;
  actions.erase(std::find_if(actions.begin(), actions.end(), [](const Action& action) {
    return action.kind == ActionKind::wait && action.lane == Lane::copy_in;
  }));
  CHECK(windows.first_fault() ==
        "windows, action 10 (get): writes `weight 2` where compute may still be reading `weight 0`");
}

TEST_CASE("a copy that comes too early is seen by the value that it destroys") {
  Windows windows;
  windows.schedule.operands[windows.schedule.actions[5].first + 1].place.offset = 0;  // weight 1 into slot 0
  CHECK(windows.first_fault().find("may still be reading `weight 0`") != std::string::npos);
}

TEST_CASE("a wait for an event that nobody recorded is refused") {
  Windows windows;
  std::swap(windows.schedule.actions[1], windows.schedule.actions[2]);
  CHECK(windows.first_fault() == "windows, action 1 (wait): waits for an event that nobody recorded");
}

TEST_CASE("values of an earlier run do not count") {
  Windows windows;
  ScheduleChecker checker(windows.set);
  for (const Access& access : windows.set.held) checker.hold(access);
  checker.run(windows.schedule);
  RunSchedule late{.name = "late"};
  const Access stale = Windows::device(0, windows.schedule.operands[windows.schedule.actions[11].first + 1].value);
  late.add({.kind = ActionKind::launch, .task = 0}, std::span(&stale, 1), {});
  checker.run(late);
  REQUIRE(checker.faults().size() == 1);
  CHECK(checker.faults()[0] == "late, action 0 (matmul): reads `weight 2` of an earlier run");
}

TEST_CASE("host access to pinned memory is ordered like any other") {
  ScheduleSet set;
  set.values = {"staged", "tokens"};
  set.lasting = {false, true};
  RunSchedule upload{.name = "upload"};
  const Access staged{{Space::staging, 0, 0, 16}, 0}, tokens{{Space::device, 0, 0, 16}, 1};
  upload.add({.kind = ActionKind::host, .lane = Lane::host}, {}, std::span(&staged, 1));
  upload.add({.kind = ActionKind::copy}, std::span(&staged, 1), std::span(&tokens, 1));
  number_versions(set, upload);
  ScheduleChecker two_slots(set), one_slot(set), waited(set);
  for (int i = 0; i < 2; ++i) {
    two_slots.run(upload, i, 16);
    one_slot.run(upload, 0, 16);
    waited.run(upload, 0, 16);
    waited.synchronize();
  }
  CHECK(two_slots.faults().empty());
  CHECK(waited.faults().empty());
  REQUIRE(one_slot.faults().size() == 1);
  CHECK(one_slot.faults()[0] == "upload, action 0 (host): writes `staged` where compute may still be reading `staged`");
}

TEST_CASE("no place is outside of its memory, and nothing overlaps values that outlive a run") {
  Plan plan = real_plan();
  RunSchedule& schedule = plan.schedules[Run::evaluate];
  Access& made = schedule.operands[schedule.actions[0].first + schedule.actions[0].reads];
  const std::int64_t there = made.place.offset;
  made.place.offset = plan.device_bytes - made.place.bytes + 256;
  CHECK(schedule_faults(plan).at(0).starts_with("evaluate: a place of 512 bytes at "));
  CHECK(schedule_faults(plan).size() == 1);
  made.place.offset = plan.tensor({"moment1", "o.weight", 0}).offset;
  CHECK(schedule_faults(plan).at(0).ends_with("over `moment1.o.weight@0`, which outlives its run"));
  made.place.offset = there;
  CHECK(schedule_faults(plan).empty());
}

TEST_CASE("what reads a lasting value expects it as its run has left it by then") {
  ScheduleSet set;
  set.tasks.push_back({.instance = {.kind = "sum", .geometry = {}}, .name = "sum", .summed = {0}});
  set.tasks.push_back({.instance = {.kind = "use", .geometry = {}}, .name = "use"});
  set.values = {"gradient"};
  set.lasting = {true};
  const Access gradient{{Space::device, 0, 0, 16}, 0};
  set.held = {gradient};
  RunSchedule schedule{.name = "run"};
  for (int layer : {0, 1}) schedule.add({.task = 0, .layer = layer}, {}, {&gradient, 1});
  schedule.add({.task = 1}, {&gradient, 1}, {});
  number_versions(set, schedule);
  auto faults = [&](std::size_t i, std::size_t j) {
    RunSchedule mutant = schedule;
    std::swap(mutant.actions[i], mutant.actions[j]);
    ScheduleChecker checker(set);
    checker.hold(gradient);
    for (int run = 0; run < 2; ++run) checker.run(i == j ? schedule : mutant);
    return checker.faults();
  };
  CHECK(faults(0, 0) == std::vector<std::string>{});
  CHECK(faults(1, 2).at(0) == "run, action 1 (use): reads `gradient` after 1 writes in this run, expected 2");
  // In another order sums have other bits.
  CHECK(faults(0, 1).at(0) == "run, action 0 (sum, layer 1): reads `gradient` after 0 writes in this run, expected 1");
  CHECK(faults(0, 1).at(1) == "run, action 0 (sum, layer 1): makes version 2 of `gradient`, expected 1");
}

// What a launch makes may be read by nobody, or its place may be free: such mutants are no faults. Those that change
// a read elsewhere must be refused.
TEST_CASE("schedules of a plan with a place moved or two neighbours exchanged are refused, unless they do no harm") {
  const Plan plan = real_plan();
  std::uint64_t random = 1;
  auto below = [&](std::size_t limit) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::size_t>(random >> 33) % limit;
  };
  int refused = 0;
  for (int trial = 0; trial < 200; ++trial) {
    Plan mutant = plan;
    RunSchedule& schedule = mutant.schedules[trial % 2 ? Run::first : Run::later];
    const std::size_t index = below(schedule.actions.size() - 1);
    Action &action = schedule.actions[index], &next = schedule.actions[index + 1];
    if (trial % 4 < 2) {
      std::swap(action, next);
      const auto reads = schedule.reads(action);  // the next action reads an earlier result
      const auto made = schedule.writes(next);
      const bool needs = std::any_of(reads.begin(), reads.end(), [&](const Access& read) {
        return read.value >= 0 && std::find(made.begin(), made.end(), read) != made.end();
      });
      if (!needs) continue;
    } else {
      if (action.reads == 0) continue;
      Access& operand = schedule.operands[action.first + below(action.reads)];
      if (!operand.place.present() || operand.place.bytes == 0) continue;
      operand.place.offset += 256;
    }
    CAPTURE(trial);
    CHECK_FALSE(schedule_faults(mutant).empty());
    ++refused;
  }
  CHECK(refused > 100);
}

TEST_CASE("an output may be placed on an operand only where its op says so") {
  Plan plan = real_plan();
  RunSchedule& schedule = plan.schedules[Run::first];
  auto product = std::find_if(schedule.actions.begin(), schedule.actions.end(), [&](const Action& action) {
    return action.kind == ActionKind::launch && plan.schedules.task_of(action).instance.kind == "matmul";
  });
  REQUIRE(product != schedule.actions.end());
  Access& made = schedule.operands[product->first + product->reads];
  made.place.offset = schedule.operands[product->first].place.offset;
  const auto faults = schedule_faults(plan);
  REQUIRE_FALSE(faults.empty());
  CHECK(faults[0].find("over its operand") != std::string::npos);
}
