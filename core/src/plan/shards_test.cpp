// Shards: how rows are split, and that the plans of all ranks fit together.
#include "plan/shards.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "plan/rank_plans.h"
#include "plan/schedule/make_schedules.h"
#include "plan/schedule/residency.h"
#include "plan/show_schedules.h"

using namespace quern;

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
    for (unsigned places : {0u, 3u, 11u, 12u})
      for (bool weights : {false, true})
        for (bool gradients : {false, true})
          for (std::int64_t in_tree : {0, 4}) {
            const bool refused =
                (!weights && (places & 8)) || (gradients && (!weights || in_tree > 0)) || (!gradients && (places & 4));
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
      for (unsigned places : {0u, 3u, 16u, 19u, 4u, 8u, 15u})
        for (DType master : {DType::f32, DType::bf16})
          for (int ahead : {1, 3}) {
            const bool shards = (places & 12) != 0;  // in stores
            if (shards && ahead > 1) continue;       // as without this
            if ((places & 8 && !(sharded & 1)) || (places & 4 && !(sharded & 2))) continue;
            CAPTURE(ranks);
            CAPTURE(sharded);
            CAPTURE(places);
            CAPTURE(name_of(master));
            CAPTURE(ahead);
            const std::vector<Plan> plans =
                plans_of(ranks, Sharding::ranks, 0,
                         {.places = places,
                          .window_bytes = ahead > 1 || shards ? 600 : std::int64_t{128} << 20,
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

TEST_CASE("a rank's part of a gradient is its rows, in the whole or by themselves, and all parts are the whole") {
  for (bool sharded : {false, true}) {
    CAPTURE(sharded);
    const std::vector<Plan> plans = plans_of(2, Sharding::ranks, 0, {.weights = sharded, .gradients = sharded});
    std::int64_t next = 0;
    for (const Plan& plan : plans) {
      const PlannedTensor& whole = plan.tensor({names::kGradient, "qkv.weight", 1});
      const PlannedTensor part = plan.part({names::kGradient, "qkv.weight", 1, TensorId::kOwn});
      CHECK(part.part == TensorId::kOwn);
      CHECK(part.whole == whole.extents);
      CHECK(part.first == next);
      CHECK(part.extents[1] == whole.extents[1]);
      next += element_count(part.extents);
      CHECK(whole.over_ranks == sharded);
      CHECK_FALSE(part.over_ranks);
      CHECK(part.part_of == (sharded ? -1 : whole.offset));
      if (!sharded) CHECK(part.offset == whole.offset + byte_count({part.first}, part.dtype));
      CHECK(part.place().space == Space::device);
      // Alike on all ranks, so not split.
      const PlannedTensor norm = plan.part({names::kGradient, "attn_norm.weight", 1, TensorId::kOwn});
      CHECK(norm.whole.empty());
      CHECK(norm.extents == plan.tensor({names::kGradient, "attn_norm.weight", 1}).extents);
    }
    CHECK(next == element_count(plans[0].tensor({names::kGradient, "qkv.weight", 1}).extents));
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
  for (const std::string line :
       {"copy in       fetch ", "communication gather   all_gather working qkv.weight, layer 0",
        "communication reduce   reduce_scatter gradient in a shard qkv.weight, layer 1", "communication launch   add ",
        "copy out      release "}) {
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
