// Checks of the schedules of several ranks: how ranks agree in an update, and that changed schedules are refused.
#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "plan/rank_plans.h"
#include "plan/schedule/make_schedules.h"

using namespace quern;

namespace {

/// A rank's changed plan, among the other ranks' plans.
struct Mutants {
  std::vector<Plan> plans;
  std::map<std::string, int> tried = {}, missed = {};
  std::string first_missed = {};

  static constexpr std::size_t kRank = 1, kStride = 4;  // 1: all mutants, for some seconds
  static constexpr Run kChanged[] = {Run::first,  Run::later, Run::last,          Run::evaluate,
                                     Run::update, Run::apply, Run::updating_first};

  bool found(const Plan& mutant) const {
    if (!schedule_faults(mutant).empty()) return true;
    std::vector<const ScheduleSet*> schedules;
    for (const Plan& plan : plans) schedules.push_back(&plan.schedules);
    schedules[kRank] = &mutant.schedules;
    return !rank_faults(schedules).empty();
  }
  void judge(const std::string& kind, const Plan& mutant, Run run, std::size_t action) {
    ++tried[kind];
    if (found(mutant)) return;
    ++missed[kind];
    if (first_missed.empty())
      first_missed = kind + " in " + std::string(name_of(run)) + " at action " + std::to_string(action);
  }
  /// change(plan, schedule, index) of a copy, for every kStride-th action that is one of the wanted; false: it cannot
  /// be done.
  void each(const std::string& kind, const std::function<bool(const Plan&, const Action&)>& wanted,
            const std::function<bool(Plan&, RunSchedule&, std::size_t)>& change) {
    std::size_t seen = 0;
    for (Run run : kChanged) {
      const RunSchedule& schedule = plans[kRank].schedules[run];
      for (std::size_t i = 0; i < schedule.actions.size(); ++i) {
        if (!wanted(plans[kRank], schedule.actions[i]) || seen++ % kStride != 0) continue;
        Plan mutant = plans[kRank];
        if (change(mutant, mutant.schedules[run], i)) judge(kind, mutant, run, i);
      }
    }
  }
};

bool is_collective(const Plan&, const Action& action) { return action.kind == ActionKind::collective; }
/// Whether it is on the communication lane, a collective of this kind or a launch of this op.
std::function<bool(const Plan&, const Action&)> does(const std::string& kind) {
  return [kind](const Plan& plan, const Action& action) {
    return action.lane == Lane::communication && action.task >= 0 &&
           plan.schedules.task_of(action).instance.kind == kind;
  };
}

/// Moves an action to another place.
void move_action(RunSchedule& schedule, std::size_t from, std::size_t to) {
  const auto at = [&](std::size_t index) { return schedule.actions.begin() + static_cast<std::ptrdiff_t>(index); };
  from < to ? std::rotate(at(from), at(from + 1), at(to + 1)) : std::rotate(at(to), at(from), at(from + 1));
}

/// The next launch, or the one before, that uses a value.
std::optional<std::size_t> launch_of(const RunSchedule& schedule, std::size_t from, int step, std::int32_t value) {
  for (auto i = static_cast<std::ptrdiff_t>(from) + step; i >= 0 && i < std::ssize(schedule.actions); i += step) {
    const Action& action = schedule.actions[static_cast<std::size_t>(i)];
    if (action.kind != ActionKind::launch || action.lane != Lane::compute) continue;
    const auto operands = schedule.operands_of(action);
    if (std::any_of(operands.begin(), operands.end(), [&](const Access& access) { return access.value == value; }))
      return static_cast<std::size_t>(i);
  }
  return {};
}

}  // namespace

TEST_CASE("ranks agree on the amaxes of a window between its update and its working copies, a layer ahead") {
  for (std::int64_t window_bytes : {std::int64_t{128} << 20, std::int64_t{60}}) {  // whole matrices, and slices
    CAPTURE(window_bytes);
    const Plan plan =
        std::move(plans_of(3, Sharding::ranks, 0, {.places = 3, .window_bytes = window_bytes, .scaled = true})[1]);
    auto kind_of = [&](const Action& action) {
      return action.task < 0 ? "" : plan.schedules.task_of(action).instance.kind;
    };
    for (Run run : {Run::updating_first, Run::apply}) {
      CAPTURE(name_of(run));
      std::vector<std::string> steps;  // of the last layer
      for (const Action& action : plan.schedules[run].actions) {
        const std::string kind = kind_of(action);
        if (action.layer != 1 || (action.kind != ActionKind::launch && action.kind != ActionKind::collective)) continue;
        if (steps.empty() || steps.back() != kind) steps.push_back(kind);
      }
      auto at = [&](const char* kind) { return std::find(steps.begin(), steps.end(), kind); };
      CHECK(at("adamw") < at("amax"));
      CHECK(at("amax") < at("all_reduce"));
      CHECK(at("all_reduce") < at("quantize_amax"));
      CHECK(at("quantize_amax") < at("all_gather"));
      REQUIRE(at("all_gather") != steps.end());
      const RunSchedule& schedule = plan.schedules[run];
      const auto forward = std::find_if(schedule.actions.begin(), schedule.actions.end(), [&](const Action& action) {
        return action.layer == 0 && kind_of(action) == "matmul";
      });
      const auto gathered = std::find_if(schedule.actions.begin(), schedule.actions.end(), [&](const Action& action) {
        return action.layer == 1 && kind_of(action) == "all_gather";
      });
      if (run == Run::updating_first) CHECK(gathered < forward);
    }
    for (const Action& action : plan.schedules[Run::update].actions) CHECK(kind_of(action) != "amax");
  }
}

TEST_CASE("weights that are gathered before their update are refused") {
  Plan plan = std::move(plans_of(2, Sharding::ranks, 0, {.places = 3, .weights = true})[0]);
  RunSchedule& schedule = plan.schedules[Run::updating_first];
  int tried = 0, named = 0;
  for (std::size_t i = 0; i < schedule.actions.size(); ++i) {
    const Action& action = schedule.actions[i];
    Access& part = schedule.operands[action.first];
    if (action.kind != ActionKind::collective || action.lane != Lane::communication || part.version == 0) continue;
    const RunSchedule right = schedule;
    const auto written = launch_of(schedule, i, -1, part.value);
    REQUIRE(written);
    part.version = 0;
    move_action(schedule, i, *written);
    const std::vector<std::string> faults = schedule_faults(plan);
    CHECK_FALSE(faults.empty());
    named += std::any_of(faults.begin(), faults.end(), [](const std::string& fault) {
      return fault.find("gathered before") != std::string::npos;  // unless another value is in the slot by then
    });
    schedule = right;
    ++tried;
  }
  CHECK(tried > 5);
  CHECK(named > 5);
}

TEST_CASE("schedules of several ranks with an action dropped, swapped or moved are refused") {
  for (const Stored& stored : {Stored{.places = 19, .weights = true, .gradients = true, .ahead = 2},
                               Stored{.places = 31, .weights = true, .gradients = true, .ahead = 2, .scaled = true}}) {
    Mutants mutants{.plans = plans_of(3, Sharding::ranks, 0, stored)};
    // A wait for an earlier run may be one for some of its predecessors only.
    auto is_wait = [](const Plan& plan, const Action& action) {
      if (action.kind != ActionKind::wait) return false;
      const auto& runs = plan.schedules.runs;
      const auto run = std::find_if(std::begin(runs), std::end(runs), [&](const RunSchedule& schedule) {
        return &action >= schedule.actions.data() && &action < schedule.actions.data() + schedule.actions.size();
      });
      const auto works = [](const Action& other) {
        return other.kind != ActionKind::record && other.kind != ActionKind::wait;
      };
      const auto first = std::find_if(run->actions.begin(), run->actions.end(), works);
      return std::any_of(first, run->actions.end(), [&](const Action& other) {
        return other.kind == ActionKind::record && other.event == action.event;
      });
    };
    auto drop = [](Plan&, RunSchedule& schedule, std::size_t i) {
      schedule.actions.erase(schedule.actions.begin() + static_cast<std::ptrdiff_t>(i));
      return true;
    };
    mutants.each("dropped wait", is_wait, drop);
    for (const char* kind : {"all_gather", "reduce_scatter", "all_reduce", "add"})
      mutants.each("dropped " + std::string(kind), does(kind), drop);
    for (const ActionKind kind : {ActionKind::get, ActionKind::put})
      mutants.each(
          "dropped " + std::string(name_of(kind)),
          [&](const Plan&, const Action& action) { return action.kind == kind; }, drop);
    mutants.each("swapped collectives", is_collective, [](Plan&, RunSchedule& schedule, std::size_t i) {
      for (std::size_t next = i + 1; next < schedule.actions.size(); ++next)
        if (schedule.actions[next].kind == ActionKind::collective) {
          std::swap(schedule.actions[i], schedule.actions[next]);
          return true;
        }
      return false;
    });
    mutants.each("early release", does("reduce_scatter"), [](Plan&, RunSchedule& schedule, std::size_t i) {
      const auto made = launch_of(schedule, i, -1, schedule.reads(schedule.actions[i])[0].value);
      if (made) move_action(schedule, i, *made);
      return made.has_value();
    });
    mutants.each("acquire behind its use", does("all_gather"), [](Plan&, RunSchedule& schedule, std::size_t i) {
      const auto used = launch_of(schedule, i, 1, schedule.writes(schedule.actions[i])[0].value);
      if (used) move_action(schedule, i, *used);
      return used.has_value();
    });
    mutants.each("wrong home version", is_collective, [](Plan&, RunSchedule& schedule, std::size_t i) {
      const Action& action = schedule.actions[i];
      Access &read = schedule.operands[action.first], &written = schedule.operands[action.first + action.reads];
      ++(i % 2 == 0 ? read : written).version;
      return read.place.bytes > 0 && written.place.bytes > 0;
    });
    // The values behind the first one of a slot are nearer to it.
    mutants.each("slot too small", does("all_gather"), [](Plan& plan, RunSchedule& schedule, std::size_t i) {
      const Place slot = schedule.writes(schedule.actions[i])[0].place;
      bool moved = false;
      for (Access& access : schedule.operands)
        if (access.place.space == Space::device && access.place.offset >= slot.offset + slot.bytes &&
            access.place.offset < plan.ring.offset + plan.ring.bytes) {
          access.place.offset -= 16;
          moved = true;
        }
      return moved;
    });
    for (const auto& [kind, tried] : mutants.tried) {
      CAPTURE(kind);
      CAPTURE(mutants.first_missed);
      CHECK(tried >= (kind == "dropped all_reduce" ? 1 : 5));
      CHECK(mutants.missed[kind] == 0);
    }
  }
}
