// Shards: how rows are split, and that the plans of all ranks fit together.
#include "plan/shards.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "plan/laws/check_schedules.h"
#include "plan/schedule/make_schedules.h"
#include "plan/show_schedules.h"
#include "plan/test_plans.h"

using namespace quern;

namespace {

PlanOptions rank_options(int ranks, int rank, Sharding sharding) {
  PlanOptions options = tiny_options();
  options.state.ranks = ranks;
  options.state.rank = rank;
  options.state.meet = true;
  options.state.master.sharding = options.state.moments.sharding = sharding;
  return options;
}

/// Of all ranks, on a device with small alignment, so that the tiny model's matrices can be split.
struct Stored {
  unsigned places = 0;  ///< bit 0: masters, bit 1: moments, bit 2: weights, bit 3: gradients
  bool activations = false;
  std::int64_t window_bytes = std::int64_t{128} << 20;
  bool weights = false, gradients = false;  ///< these are sharded too
  DType master = DType::f32;
  int ahead = 1;
  bool tied = false;  ///< the head's weight is the embedding's, whose gradient two programs make
  std::vector<std::string> frozen = {};
  bool scaled = false;  ///< copies of matrices have one scale each, for which ranks need the amax of all rows
};

/// Matmuls of weights with one scale for each matrix.
class ScaledWeights final : public testkit::PlainPrecision {
 public:
  ScaledWeights() : PlainPrecision(DType::bf16) {}
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product == Product::loss || site.product == Product::weight_gradient)
      return lower_to_matmul(site, lowering);
    const Attributes format{{"format", std::string("e4m3")}};
    const bool output = site.product == Product::output;
    const ValueId input = output ? site.x : site.dy;
    const std::vector<ValueId> a = lowering.emit("quantize", {input}, format, lowering.program()[input].name + ".e4m3"),
                               b = lowering.working_copy(site.parameter, "quantize", format);
    lowering.produce("matmul", {a[0], output ? b[0] : b[2], site.bias, a[1], b[1]},
                     {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}});
  }
};

std::vector<Plan> plans_of(int ranks, Sharding sharding, std::int64_t in_tree = 0, const Stored& stored = {}) {
  PlanningDevice device;
  device.device_traits.alignment = 16;
  std::vector<Plan> plans;
  for (int rank = 0; rank < ranks; ++rank) {
    PlanOptions options = rank_options(ranks, rank, sharding);
    options.state.in_tree = in_tree;
    if (stored.places & 1) options.state.master.memory = "host";
    if (stored.places & 2) options.state.moments.memory = "host";
    if (stored.places & 4) options.state.weights.memory = "host";
    if (stored.places & 8) options.state.gradients.memory = "host";
    options.update_window_bytes = stored.window_bytes;
    if (stored.weights) options.state.weights.sharding = Sharding::ranks;
    if (stored.gradients) options.state.gradients.sharding = Sharding::ranks;
    if (stored.activations) options.state.activations.memory = "host";
    options.master = stored.master;
    options.ahead = stored.ahead;
    const testkit::TinyModelOptions form{.tied = stored.tied, .frozen = stored.frozen};
    plans.push_back(stored.scaled ? tiny_plan(options, device, ScaledWeights(), form)
                                  : tiny_plan(options, device, testkit::PlainPrecision(DType::bf16), form));
  }
  return plans;
}

/// Of each plan's schedules, and of all of them together.
std::vector<std::string> faults_of(const std::vector<Plan>& plans) {
  std::vector<std::string> faults;
  auto add = [&](const std::vector<std::string>& more) { faults.insert(faults.end(), more.begin(), more.end()); };
  std::vector<const ScheduleSet*> schedules;
  for (const Plan& plan : plans) {
    add(schedule_faults(plan));
    schedules.push_back(&plan.schedules);
  }
  add(rank_faults(schedules));
  return faults;
}

}  // namespace

TEST_CASE("rows are split evenly at multiples of a unit, and not at all where a rank would have none") {
  CHECK(split_rows(896, 2, 4) == RowBounds{0, 224, 448, 672, 896});
  CHECK(split_rows(896, 2, 3) == RowBounds{0, 298, 596, 896});
  CHECK(split_rows(300, 128, 2) == RowBounds{0, 128, 300});
  CHECK(split_rows(300, 128, 3).empty());
  CHECK(split_rows(7, 1, 7).size() == 8);
}

TEST_CASE("what has rows for groups of the parameter's rows is split with them") {
  const RowBounds bounds{0, 128, 300};
  CHECK(shard_of_rows({300, 10}, bounds, 1).first == 1280);
  CHECK(shard_of_rows({300, 10}, bounds, 1).extents == Extents{172, 10});
  CHECK(shard_of_rows({3, 4}, bounds, 0).extents == Extents{1, 4});
  CHECK(shard_of_rows({3, 4}, bounds, 1).first == 4);
  CHECK(shard_of_rows({3, 4}, bounds, 1).extents == Extents{2, 4});
}

TEST_CASE("the shards of all ranks are the whole, and their collectives meet, whatever is split") {
  for (Sharding sharding : {Sharding::none, Sharding::ranks})
    for (int ranks = 1; ranks <= 4; ++ranks) {
      CAPTURE(name_of(sharding));
      CAPTURE(ranks);
      const std::vector<Plan> plans = plans_of(ranks, sharding);
      std::map<std::string, std::int64_t> elements;
      bool split = false;
      for (const Plan& plan : plans) {
        for (const PlannedTensor& tensor : plan.tensors) {
          if (tensor.whole.empty()) continue;
          split = true;
          std::int64_t& next = elements[tensor.kind + tensor.parameter + std::to_string(tensor.layer)];
          CHECK(tensor.first == next);  // ranks come in order
          next += element_count(tensor.extents);
          if (&plan == &plans.back()) CHECK(next == element_count(tensor.whole));
        }
      }
      CHECK(split == (ranks > 1 && sharding == Sharding::ranks));
      CHECK(faults_of(plans) == std::vector<std::string>{});
    }
}

TEST_CASE(
    "frozen parameters are whole on every rank, or sharded where ranks gather weights, and no collective sums them") {
  for (const std::vector<std::string>& frozen :
       {std::vector<std::string>{"embedding", "qkv", "down"}, {"qkv", "o.", "up", "down", "lm_head", "final_norm"}})
    for (unsigned places : {0u, 3u, 7u, 12u})
      for (bool weights : {false, true})
        for (bool gradients : {false, true})
          for (std::int64_t in_tree : {0, 4}) {
            const bool refused =
                (!weights && (places & 4)) || (gradients && (!weights || in_tree > 0)) || (!gradients && (places & 8));
            if (refused) continue;
            CAPTURE(places);
            CAPTURE(weights);
            const std::vector<Plan> plans =
                plans_of(2, Sharding::ranks, in_tree,
                         {.places = places, .weights = weights, .gradients = gradients, .frozen = frozen});
            for (const Plan& plan : plans) {
              const ParameterPlan& qkv = plan.parameter("qkv.weight");
              CHECK(qkv.bounds.empty() == !weights);
              CHECK_FALSE(plan.find({"gradient", "qkv.weight", 0}));
              CHECK_FALSE(plan.find({"moment1", "qkv.weight", 0}));
              CHECK(plan.tensor({"master", "qkv.weight", 0}).owner == TensorOwner::working);
            }
            CHECK(faults_of(plans) == std::vector<std::string>{});
          }
}

TEST_CASE("sums in a tree meet on all ranks, and squares are of the same pieces on any number of them") {
  for (Sharding sharding : {Sharding::none, Sharding::ranks})
    for (int ranks : {1, 2, 4}) {
      CAPTURE(name_of(sharding));
      CAPTURE(ranks);
      const std::vector<Plan> plans = plans_of(ranks, sharding, 7);
      std::vector<std::string> pieces;
      for (const Plan& plan : plans) {
        const Program& own = plan.squares[0].program;
        REQUIRE(own.ops.size() == 1);
        if (sharding == Sharding::ranks || plan.options.state.rank == 0)
          for (ValueId piece : own.ops[0].inputs) pieces.push_back(own[piece].name);
      }
      const Program all = plans_of(1, Sharding::none, 7)[0].squares[0].program;
      REQUIRE(pieces.size() == all.ops[0].inputs.size());
      for (std::size_t i = 0; i < pieces.size(); ++i) CHECK(pieces[i] == all[all.ops[0].inputs[i]].name);
      CHECK(faults_of(plans) == std::vector<std::string>{});
    }
}

TEST_CASE("ranks keep their shards in stores, in windows and slots that are as large on all of them") {
  for (int ranks : {1, 2, 3})
    for (Sharding sharding : {Sharding::none, Sharding::ranks})
      for (unsigned places : {1u, 2u, 3u})
        for (std::int64_t window_bytes : {std::int64_t{128} << 20, std::int64_t{600}, std::int64_t{60}}) {
          CAPTURE(ranks);
          CAPTURE(name_of(sharding));
          CAPTURE(places);
          CAPTURE(window_bytes);
          const std::vector<Plan> plans = plans_of(
              ranks, sharding, 0, {.places = places, .window_bytes = window_bytes, .scaled = window_bytes != 600});
          for (const Plan& plan : plans) {
            CHECK(shared_text(plan) == shared_text(plans[0]));
            CHECK(plan.updates.size() == plans[0].updates.size());
            CHECK(plan.defers_update());
          }
          CHECK(faults_of(plans) == std::vector<std::string>{});
        }
}

TEST_CASE("weights and gradients of which ranks keep shards pass all checks, beside all else") {
  for (int ranks : {2, 3, 4})
    for (unsigned sharded : {1u, 2u, 3u})
      for (unsigned places : {0u, 3u, 4u, 8u, 15u})
        for (bool activations : {false, true})
          for (DType master : {DType::f32, DType::bf16})
            for (int ahead : {1, 3}) {
              if (places > 3 && (activations || ahead > 1)) continue;  // as without these
              if ((places & 4 && !(sharded & 1)) || (places & 8 && !(sharded & 2))) continue;
              CAPTURE(ranks);
              CAPTURE(sharded);
              CAPTURE(places);
              CAPTURE(activations);
              CAPTURE(name_of(master));
              CAPTURE(ahead);
              const std::vector<Plan> plans =
                  plans_of(ranks, Sharding::ranks, 0,
                           {.places = places,
                            .activations = activations,
                            .window_bytes = ahead > 1 || places > 3 ? 600 : std::int64_t{128} << 20,
                            .weights = (sharded & 1) != 0,
                            .gradients = (sharded & 2) != 0,
                            .master = master,
                            .ahead = ahead});
              for (const Plan& plan : plans) {
                CHECK(shared_text(plan) == shared_text(plans[0]));
                CHECK(ring_for(make_schedules(plan), 16, ahead, plan.ring.spare).bytes == plan.ring.bytes);
              }
              CHECK(faults_of(plans) == std::vector<std::string>{});
            }
}

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
           plan.schedules.tasks[static_cast<std::size_t>(action.task)].instance.kind == kind;
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
    const auto operands = std::span(schedule.operands).subspan(action.first, action.reads + action.writes);
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
      return action.task < 0 ? "" : plan.schedules.tasks[static_cast<std::size_t>(action.task)].instance.kind;
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
  for (const Stored& stored :
       {Stored{.places = 3, .activations = true, .weights = true, .gradients = true, .ahead = 2},
        Stored{.places = 15, .activations = true, .weights = true, .gradients = true, .ahead = 2, .scaled = true}}) {
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

TEST_CASE("a gradient that two programs make is reduced twice") {
  for (unsigned places : {3u, 15u}) {
    CAPTURE(places);
    CHECK(faults_of(
              plans_of(2, Sharding::ranks, 0, {.places = places, .weights = true, .gradients = true, .tied = true})) ==
          std::vector<std::string>{});
  }
}

TEST_CASE("a schedule is shown in the words fetch, gather, reduce and release") {
  const Plan plan = std::move(plans_of(2, Sharding::ranks, 0, {.places = 15, .weights = true, .gradients = true})[1]);
  const std::string text = show_schedules(plan, PlanningDevice().traits(), "later micro-step");
  for (const std::string line : {"copy in  fetch ", "communication gather     all_gather working qkv.weight, layer 0",
                                 "communication reduce     reduce_scatter gradient in a shard qkv.weight, layer 1",
                                 "communication launch     add ", "copy out release "}) {
    CAPTURE(line);
    CHECK(text.find(line) != std::string::npos);
  }
}

TEST_CASE("gradients are reduced behind the layer that makes them, on a lane of their own") {
  const Plan plan = std::move(plans_of(2, Sharding::ranks)[1]);
  const RunSchedule& last = plan.schedules[Run::last];
  std::vector<int> layers;
  std::size_t backward = 0;  // launches of the layer before, when the last of them was enqueued
  for (const Action& action : last.actions) {
    if (action.kind == ActionKind::launch) backward = static_cast<std::size_t>(&action - last.actions.data());
    if (action.kind != ActionKind::collective) continue;
    CHECK(action.lane == Lane::communication);
    CHECK(static_cast<std::size_t>(&action - last.actions.data()) > backward);
    if (action.reads > 1) continue;  // of tensors that are no matrix, at the end
    if (action.layer >= 0 && (layers.empty() || layers.back() != action.layer)) layers.push_back(action.layer);
  }
  REQUIRE(layers.size() == 2);
  CHECK(layers[0] == 1);
  CHECK(layers[1] == 0);
  auto collectives = [&](Run run) {
    return std::count_if(plan.schedules[run].actions.begin(), plan.schedules[run].actions.end(),
                         [](const Action& action) { return action.kind == ActionKind::collective; });
  };
  CHECK(collectives(Run::later) == 0);
  CHECK(collectives(Run::evaluate) == 0);
  CHECK(collectives(Run::first) == collectives(Run::apply));
  CHECK(collectives(Run::update) == 1);  // losses and squares; this precision has no states
}

TEST_CASE("the timeline of a step of several ranks has its collectives, on their lane, with their times") {
  DeviceTraits device{.id = "linked", .name = {}, .memory_rate = 1e9, .peer_rate = 1e8, .matmul_rates = {}};
  const Plan plan = std::move(plans_of(2, Sharding::ranks)[0]);
  double gathered = 0, reduced = 0, agreed = 0;
  for (const TimelineEvent& event : simulated_timeline(plan, device)) {
    if (event.lane != Lane::communication) continue;
    CHECK(event.seconds > 0);
    (event.run == "first micro-step" ? gathered : event.run == "last micro-step" ? reduced : agreed) += event.seconds;
  }
  CHECK(gathered > 0);
  CHECK(reduced > gathered);  // gradients are fp32, working copies bf16
  CHECK(agreed > 0);          // losses and norms
}
