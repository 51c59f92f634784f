// The places poisoned behind each action, in small schedules, and that plans keep the rules with it.
#include "plan/laws/poison.h"

#include <doctest/doctest.h>

#include "plan/laws/check_schedules.h"
#include "plan/test_plans.h"

using namespace quern;

namespace {

struct Small {
  ScheduleSet set;
  RunSchedule& schedule = set[Run::first];

  Small() { set.tasks.push_back({.instance = {.kind = "op", .geometry = {}}, .name = "op"}); }
  /// On the device.
  Access value(std::int64_t offset, std::int64_t bytes, bool lasting = false) {
    set.values.push_back("v" + std::to_string(set.values.size()));
    set.lasting.push_back(lasting);
    return {{Space::device, 0, offset, bytes}, static_cast<std::int32_t>(set.values.size() - 1)};
  }
  void launch(const std::vector<Access>& reads, const std::vector<Access>& writes, Lane lane = Lane::compute) {
    schedule.add({.kind = ActionKind::launch, .lane = lane, .task = 0}, reads, writes);
  }
  void order(Lane later, Lane earlier) {
    const std::int32_t event = schedule.events++;
    schedule.add({.kind = ActionKind::record, .lane = earlier, .event = event}, {}, {});
    schedule.add({.kind = ActionKind::wait, .lane = later, .event = event}, {}, {});
  }
  /// "2 compute 64+16": the number of the action behind which it stands, among those that are no fills.
  std::vector<std::string> fills() {
    poison_freed(set);
    std::vector<std::string> found;
    int others = -1;
    for (const Action& action : schedule.actions) {
      if (action.kind != ActionKind::fill) {
        ++others;
        continue;
      }
      CHECK(action.byte == 0xFF);
      const Place& place = schedule.writes(action)[0].place;
      found.push_back(std::to_string(others) + " " + std::string(name_of(action.lane)) + " " +
                      std::to_string(place.offset) + "+" + std::to_string(place.bytes));
    }
    return found;
  }
};

using Fills = std::vector<std::string>;

}  // namespace

TEST_CASE("a value is poisoned behind its last use, unless it outlives the run") {
  Small small;
  const Access a = small.value(0, 16), b = small.value(16, 16), weight = small.value(32, 16, true);
  small.launch({weight}, {a});
  small.launch({a}, {b});
  small.launch({a, b}, {weight});
  CHECK(small.fills() == Fills{"2 compute 0+16", "2 compute 16+16"});
}

TEST_CASE("an unread output is poisoned at once, and so is a workspace") {
  Small small;
  const Access unread = small.value(0, 16), workspace{.place = {Space::device, 0, 64, 32}};
  small.launch({}, {unread, workspace});
  CHECK(small.fills() == Fills{"0 compute 0+16", "0 compute 64+32"});
}

TEST_CASE("of an input whose memory an output took over, only the rest is poisoned") {
  Small small;
  const Access wide = small.value(0, 64), narrow = small.value(0, 16), inside = small.value(32, 8);
  small.launch({}, {wide});
  small.launch({wide}, {narrow, inside});
  small.launch({narrow, inside}, {});
  CHECK(small.fills() == Fills{"1 compute 16+16", "1 compute 40+24", "2 compute 0+16", "2 compute 32+8"});
}

TEST_CASE("a value of two lanes is poisoned on the lane of its last use, if the other one is done by then") {
  for (bool ordered : {true, false}) {
    CAPTURE(ordered);
    Small small;
    const Access a = small.value(0, 16);
    small.launch({}, {a});
    small.order(Lane::copy_out, Lane::compute);
    small.launch({a}, {});
    if (ordered) small.order(Lane::copy_out, Lane::compute);
    small.launch({a}, {}, Lane::copy_out);
    CHECK(small.fills() == (ordered ? Fills{"6 copy out 0+16"} : Fills{}));
  }
}

TEST_CASE("what the host read last is poisoned on the compute lane") {
  Small small;
  Access result = small.value(0, 16);
  result.place.space = Space::results;
  small.launch({}, {result});
  small.order(Lane::host, Lane::compute);
  small.schedule.add({.kind = ActionKind::host, .lane = Lane::host}, {&result, 1}, {});
  CHECK(small.fills() == Fills{"3 compute 0+16"});
}

TEST_CASE("plans keep the rules with their freed places poisoned") {
  for (unsigned places = 0; places < 32; ++places)
    for (int ahead : {1, 3}) {
      CAPTURE(places);
      CAPTURE(ahead);
      PlanOptions options = stored_options(places, ahead);
      options.next_logits = options.observe = true;
      Plan plan = tiny_plan(options);
      const std::size_t before = plan.schedules[Run::first].actions.size();
      poison_freed(plan.schedules);
      CHECK(plan.schedules[Run::first].actions.size() > before + 20);
      for (const std::string& fault : schedule_faults(plan)) FAIL_CHECK(fault);
    }
}

TEST_CASE("a read of a poisoned place breaks the rules") {
  Small small;
  const Access a = small.value(0, 16);
  small.launch({}, {a});
  small.launch({a}, {});
  number_versions(small.set, small.schedule);
  poison_freed(small.set);
  small.launch({a}, {});
  ScheduleChecker checker(small.set);
  checker.run(small.schedule);
  REQUIRE(checker.faults().size() == 1);
  CHECK(checker.faults()[0].find("reads `v0` where scratch is") != std::string::npos);
}
