// Schedules whose values live in stores: transfers by hand in a small schedule, and the rules over plans with every
// combination of places.
#include "plan/schedule/residency.h"

#include <algorithm>
#include <set>

#include <doctest/doctest.h>

#include "plan/laws/check_schedules.h"
#include "plan/schedule/make_schedules.h"
#include "plan/schedule/synchronize.h"
#include "plan/test_plans.h"

using namespace quern;

namespace {

constexpr std::int64_t kBytes = 64;

/// Launches over values of one store, 64 bytes each.
struct Stored {
  ScheduleSet set;
  RunSchedule& schedule = set[Run::first];

  explicit Stored(int values) {
    set.tasks.push_back({.instance = {.kind = "op", .geometry = {}}, .name = "op"});
    schedule.name = "stored";
    for (int i = 0; i < values; ++i) {
      set.values.push_back("v" + std::to_string(i));
      set.lasting.push_back(true);
      set.held.push_back(home(i));
    }
  }
  static Access home(std::int32_t value) { return {{Space::store, 0, value * kBytes, kBytes}, value}; }
  void launch(int window, std::vector<int> reads, std::vector<int> writes) {
    std::vector<Access> in, out;
    for (int value : reads) in.push_back(home(value));
    for (int value : writes) out.push_back(home(value));
    schedule.add({.kind = ActionKind::launch, .task = 0, .window = window}, in, out);
  }
  SlotRing resident(int ahead, std::int64_t kept = 0) {
    number_versions(set, schedule);
    SlotRing ring = ring_for(set, kBytes, ahead);
    ring.kept = kept;
    make_resident(set, ring, kBytes);
    synchronize(set);
    return ring;
  }
  std::vector<std::string> faults(int runs = 2) const {
    ScheduleChecker checker(set);
    for (const Access& access : set.held) checker.hold(access);
    for (int i = 0; i < runs; ++i) checker.run(schedule);
    return checker.faults();
  }
  /// "get v1": transfers and launches, in the order in which they are enqueued.
  std::vector<std::string> order() const {
    std::vector<std::string> lines;
    for (const Action& action : schedule.actions) {
      if (action.kind == ActionKind::get) lines.push_back("get " + name(schedule.reads(action)[0]));
      if (action.kind == ActionKind::put) lines.push_back("put " + name(schedule.writes(action)[0]));
      if (action.kind == ActionKind::launch) lines.push_back("launch");
    }
    return lines;
  }
  std::string name(const Access& access) const { return set.values[static_cast<std::size_t>(access.value)]; }
};

}  // namespace

TEST_CASE("where everything is on the device nothing changes") {
  Plan plan = tiny_plan(tiny_options());
  const std::size_t actions = plan.schedules[Run::first].actions.size();
  CHECK(ring_for(plan.schedules, 256, 1).bytes == 0);
  make_resident(plan.schedules, {}, 256);
  CHECK(plan.schedules[Run::first].actions.size() == actions);
  CHECK(plan.stores.empty());
}

TEST_CASE("what launches use in place stays there, beside what comes to slots") {
  Stored stored(2);
  stored.set.in_place = {true};
  stored.launch(0, {0}, {1});
  stored.launch(1, {1}, {0});
  const std::vector<Access> before = stored.schedule.operands;
  CHECK(stored.resident(1).bytes == 0);
  CHECK(stored.order() == std::vector<std::string>{"launch", "launch"});
  CHECK(stored.schedule.operands.size() == before.size());
  CHECK(stored.schedule.operands[0].place == before[0].place);
  CHECK(stored.faults().empty());
}

TEST_CASE("a value in place that another lane reads is waited for") {
  Stored stored(1);
  stored.set.in_place = {true};
  stored.launch(0, {}, {0});
  const Access value = Stored::home(0), copy{{Space::results, 0, 0, kBytes}, 1};
  stored.set.values.push_back("copy");
  stored.set.lasting.push_back(false);
  stored.schedule.add({.kind = ActionKind::copy, .lane = Lane::copy_out}, {&value, 1}, {&copy, 1});
  stored.resident(1);
  CHECK(stored.faults() == std::vector<std::string>{});
  std::erase_if(stored.schedule.actions, [](const Action& action) { return action.kind == ActionKind::wait; });
  REQUIRE(!stored.faults().empty());
  CHECK(stored.faults()[0].find("compute may still be writing") != std::string::npos);
}

TEST_CASE("values come ahead as far as there is room, and go back behind the window that changed them") {
  Stored stored(4);
  for (int i = 0; i < 4; ++i) stored.launch(i, {i}, i == 1 ? std::vector<int>{1} : std::vector<int>{});
  const SlotRing ring = stored.resident(1);
  CHECK(ring.bytes == 3 * kBytes);
  CHECK(stored.order() == std::vector<std::string>{"get v0", "get v1", "get v2", "launch", "get v3", "launch", "put v1",
                                                   "launch", "launch"});
  CHECK(stored.faults() == std::vector<std::string>{});
}

TEST_CASE("what several windows read and none writes stays as far as there is room, values soonest read again first") {
  auto passes = [](std::int64_t kept) {  // forward over three layers and back, and each back pass writes another value
    Stored stored(6);
    for (int i = 0; i < 3; ++i) stored.launch(i, {i}, {});
    for (int i = 0; i < 3; ++i) stored.launch(3 + i, {2 - i}, {5 - i});
    CHECK(reused_bytes(stored.set, kBytes) == 3 * kBytes);
    stored.resident(1, kept);
    CHECK(stored.faults() == std::vector<std::string>{});
    std::vector<std::string> lines = stored.order();
    std::erase_if(lines, [](const std::string& line) { return !line.starts_with("get "); });
    return lines;
  };
  const std::vector<std::string> once{"get v0", "get v1", "get v2"};
  auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), once.begin(), once.end());
    return more;
  };
  CHECK(passes(0) == with({"get v2", "get v1", "get v0"}));
  CHECK(passes(kBytes) == with({"get v1", "get v0"}));
  CHECK(passes(3 * kBytes - 1) == with({"get v0"}));
  CHECK(passes(3 * kBytes) == once);
  CHECK(passes(9 * kBytes) == once);
}

TEST_CASE("what a window changes is fetched by a later one only when it is back") {
  Stored stored(2);
  stored.launch(0, {}, {0});  // written whole: not fetched
  stored.launch(1, {0}, {});
  stored.launch(2, {1}, {0});
  stored.launch(3, {0, 1}, {});
  stored.resident(2);
  CHECK(stored.order() == std::vector<std::string>{"launch", "put v0", "get v0", "get v1", "launch", "launch", "put v0",
                                                   "get v0", "get v1", "launch"});
  CHECK(stored.faults() == std::vector<std::string>{});
}

TEST_CASE("a put that is left out is a fault, and so is one that comes before what it should put") {
  auto index_of = [](RunSchedule& schedule, ActionKind kind) {
    return std::find_if(schedule.actions.begin(), schedule.actions.end(),
                        [&](const Action& action) { return action.kind == kind; });
  };
  Stored left_out(2);
  left_out.launch(0, {0}, {1});
  left_out.resident(1);
  left_out.schedule.actions.erase(index_of(left_out.schedule, ActionKind::put));
  CHECK(left_out.faults(1) == std::vector<std::string>{"stored: changes `v1` in a slot and does not put it back"});

  // Behind a get of the value, so that something is there to be put.
  Stored changed(1);
  changed.set.tasks[0].changed = {0};
  changed.launch(0, {0}, {});
  changed.resident(1);
  CHECK(changed.faults() == std::vector<std::string>{});
  RunSchedule& schedule = changed.schedule;
  const auto put = index_of(schedule, ActionKind::put), launch = index_of(schedule, ActionKind::launch);
  std::rotate(launch, put, put + 1);
  CHECK(changed.faults(1).at(0).find("reads `v0 in a slot` after 0 writes in this run, expected 1") !=
        std::string::npos);
}

TEST_CASE("random windows keep the rules at every distance, and no wait of theirs can be left out for free") {
  std::uint64_t random = 1;
  auto below = [&](std::size_t limit) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int>((random >> 33) % limit);
  };
  int refused = 0, dropped = 0;
  for (int trial = 0; trial < 60; ++trial) {
    Stored stored(6);
    for (int window = 0; window < 8; ++window)
      for (int launch = below(2); launch < 2; ++launch) {
        std::set<int> reads, writes;
        for (int i = below(3); i < 3; ++i) reads.insert(below(6));
        if (below(2) == 0) writes.insert(below(6));
        for (int value : writes) reads.erase(value);
        stored.launch(window, {reads.begin(), reads.end()}, {writes.begin(), writes.end()});
      }
    stored.resident(1 + trial % 3);
    CAPTURE(trial);
    for (const std::string& fault : stored.faults()) FAIL_CHECK(fault);
    for (std::size_t i = 0; i < stored.schedule.actions.size(); ++i) {
      if (stored.schedule.actions[i].kind != ActionKind::wait) continue;
      Stored mutant = Stored(0);
      mutant.set = stored.set;
      mutant.schedule.actions.erase(mutant.schedule.actions.begin() + static_cast<std::ptrdiff_t>(i));
      ++dropped;
      refused += mutant.faults().empty() ? 0 : 1;
    }
  }
  CHECK(refused > dropped * 9 / 10);  // the others matter to runs of another order
}

TEST_CASE("plans with their state in stores keep the rules in every combination") {
  for (unsigned places = 0; places < 32; ++places) {
    CAPTURE(places);
    PlanOptions options = stored_options(places, 1, "one");
    options.next_logits = true;
    if (places & 2) options.state.moments.memory = "two";
    for (const auto& [ahead, in_place] : {std::pair(1, ""), {3, ""}, {1, "one"}, {1, "two"}}) {
      options.ahead = ahead;
      const Plan plan = tiny_plan(options, PlanningDevice(), testkit::PlainPrecision(DType::bf16), {},
                                  {{.id = in_place, .mappable = true}});
      for (const std::string& fault : schedule_faults(plan)) FAIL_CHECK(fault);
      const auto alignment = static_cast<std::int64_t>(PlanningDevice().traits().alignment);
      CHECK(ring_for(make_schedules(plan), alignment, ahead).bytes == plan.ring.bytes);
      CHECK(plan.squares.empty() == !(places & 4));
      CHECK(plan.schedules[Run::last].empty() == !(places & 4));
      std::int64_t stored = 0;
      for (const PlannedTensor& tensor : plan.tensors)
        if (tensor.owner != TensorOwner::activation) stored += tensor.store < 0 ? 0 : tensor.bytes();
      std::int64_t reserved = 0;
      for (const StorePlan& store : plan.stores) reserved += store.bytes;
      CHECK(reserved >= stored);
      CHECK((stored > 0) == (places % 16 != 0));
      CHECK((reserved > stored) >= (places >= 16));
    }
  }
}

TEST_CASE("work split over windows is the resident plan's work") {
  auto kinds = [](const Plan& plan, Run run) {
    std::multiset<std::string> found;
    for (const Action& action : plan.schedules[run].actions)
      if (action.kind == ActionKind::launch) found.insert(plan.schedules.task_of(action).instance.kind);
    return found;
  };
  PlanOptions options = tiny_options();
  const Plan resident = tiny_plan(options);
  options.state.weights.memory = "store";
  const Plan weights = tiny_plan(options);
  for (Run run : {Run::first, Run::later, Run::update, Run::refresh, Run::evaluate})
    CHECK(kinds(weights, run) == kinds(resident, run));
  options.state.moments.memory = "store";
  CHECK(kinds(tiny_plan(options), Run::first) == kinds(resident, Run::first));
}
