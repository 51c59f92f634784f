// What the planner cannot lay out is refused by the key that asks for it.
#include "plan/placement.h"

#include <doctest/doctest.h>

#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

std::string refusal(const StatePlacement& state) {
  return testkit::refusal(ErrorCode::config, [&] { check_placement(state); });
}

}  // namespace

TEST_CASE("one rank is planned, with its state on the device or in a store") {
  CHECK(refusal({}) == "accepted");
  StatePlacement state;
  for (Placement* placement : {&state.master, &state.moments, &state.gradients, &state.weights, &state.activations}) {
    placement->memory = "host";
    CHECK(refusal(state) == "accepted");
  }
}

TEST_CASE("each setting that the planner does not know, or that needs another one, is refused by its key") {
  StatePlacement ranks, gradients, weights;
  ranks.ranks = 2;
  ranks.meet = true;
  ranks.master.sharding = ranks.moments.sharding = Sharding::ranks;
  CHECK(refusal(ranks) == "accepted");
  ranks.master.memory = ranks.moments.memory = "host";
  CHECK(refusal(ranks) == "accepted");
  ranks.weights.memory = "host";
  gradients.gradients.sharding = Sharding::ranks;
  weights.weights.sharding = Sharding::ranks;
  CHECK(refusal(ranks) ==
        "plan: not in this version:\n  memory.weights = \"host\" needs parallel.shard_weights = \"ranks\"; "
        "set it to \"device\"");
  ranks.weights.sharding = Sharding::ranks;
  CHECK(refusal(ranks) == "accepted");
  for (const auto& [state, key] :
       {std::pair(gradients, "parallel.shard_gradients"), {weights, "parallel.shard_weights"}})
    CHECK(refusal(state).ends_with(std::string("\n  ") + key +
                                   " = \"ranks\" needs parallel.shard_optimizer = \"ranks\"; set it to \"none\""));
  StatePlacement all = ranks;
  all.weights = {.sharding = Sharding::ranks};
  all.gradients = all.weights;
  CHECK(refusal(all) == "accepted");
  all.in_tree = 4;
  CHECK(refusal(all).find("\n  parallel.shard_gradients") != std::string::npos);
}

TEST_CASE("a share of the layers stays on the device, spread evenly") {
  for (const char* text : {"device", "auto", "host"}) {
    const Placement placement = placement_named(text).value();
    CHECK(placement.memory == text);
    CHECK(placement.device_percent == 0);
    for (const int layer : {-1, 0, 7}) CHECK(placement.on_device(layer) == (placement.memory == kOnDevice));
  }
  for (int percent = 1; percent < 100; ++percent) {
    const Placement placement = placement_named("device:" + std::to_string(percent) + "%,host").value();
    CHECK(placement.memory == "host");
    CHECK(text_of(placement) == "device:" + std::to_string(percent) + "%,host");
    CHECK(placement.on_device(-1));
    int stay = 0;
    for (int layer = 0; layer < 200; ++layer) {
      stay += placement.on_device(layer);
      CHECK(stay == (layer + 1) * percent / 100);
    }
  }
  for (const char* text : {"device:", "device:40", "device:40%", "device:40%,", "device:40%host", "device:0%,host",
                           "device:100%,host", "device:-1%,host", "device:4.5%,host", "device: 40%,host",
                           "device:40%,device", "device:40%,auto", "device:99999999999999999999%,host"}) {
    CAPTURE(text);
    CHECK_FALSE(placement_named(text));
  }
}

TEST_CASE("all refusals come together") {
  StatePlacement state;
  state.ranks = 8;
  state.meet = true;
  state.weights = {.memory = "disk", .sharding = Sharding::ranks};
  state.gradients.memory = "disk";
  const std::string text = refusal(state);
  for (const char* key : {"parallel.shard_weights", "memory.gradients = \"disk\""})
    CHECK(text.find(key) != std::string::npos);
}
