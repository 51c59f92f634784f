// Conflicts that the run's own sections find, each at its key. Their plugins are tested where plugins are.
#include "run/options/run_schemas.h"

#include <doctest/doctest.h>

#include "config/resolve.h"
#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

// Of the section alone, so that a model and data need not be named.
std::string fault(const std::string& section, const std::string& text) {
  std::vector<SectionSchema> schemas = run_schemas();
  std::erase_if(schemas, [&](const SectionSchema& schema) { return schema.name != section; });
  PluginHost host({});
  return testkit::refusal(ErrorCode::config, [&] {
    resolve(ConfigDocument::parse("[" + section + "]\n" + text + "\n", "run.toml"), schemas, host);
  });
}

}  // namespace

TEST_CASE("several ranks need a communicator, and shards several ranks") {
  CHECK(fault("parallel", "") == "accepted");
  CHECK(fault("parallel", "ranks = -1")
            .starts_with("run.toml:2:1: parallel.ranks: out of range, found -1, expected an "
                         "integer from 0 to 65536"));
  CHECK(fault("parallel", "ranks = 65537").find("out of range, found 65537") != std::string::npos);
  CHECK(fault("parallel", "ranks = 2") ==
        "run.toml:1:2: parallel.communicator: found \"none\" with 2 ranks, expected the id of a communicator, or "
        "parallel.ranks = 1");
  CHECK(fault("parallel", "ranks = 2\ncommunicator = \"nccl\"")
            .starts_with("run.toml:3:1: parallel.communicator: no such communicator plugin: found \"nccl\""));
  CHECK(fault("parallel", "collectives.all_gather = \"memcpy\"")
            .find("parallel.collectives.all_gather: found \"memcpy\" without a communicator, expected \"none\"") !=
        std::string::npos);
  CHECK(
      fault("parallel", "collectives.broadcast = \"memcpy\"")
          .find(
              "parallel.collectives.broadcast: unknown key, expected one of all_gather, reduce_scatter, all_reduce") !=
      std::string::npos);
  CHECK(fault("parallel", "shard_optimizer = \"ranks\"") == "accepted");  // one rank has all of it
  CHECK(fault("parallel", "shard_optimizer = \"rank\"").find("not a choice, found \"rank\"") != std::string::npos);
}

TEST_CASE("weights and gradients are sharded where the optimizer is") {
  for (const std::string key : {"shard_gradients", "shard_weights"}) {
    CHECK(fault("parallel", "shard_optimizer = \"ranks\"\n" + key + " = \"ranks\"") == "accepted");
    CHECK(fault("parallel", key + " = \"ranks\"").find("found \"ranks\" with shard_optimizer = \"none\"") !=
          std::string::npos);
  }
  CHECK(fault("parallel", "shard_optimizer = \"ranks\"\nshard_gradients = \"ranks\"\nreduction = \"reproducible\"")
            .find("parallel.shard_gradients: found \"ranks\" with reduction") != std::string::npos);
}

namespace {

std::string sharding_of(const std::string& text) {
  std::vector<SectionSchema> schemas = run_schemas();
  std::erase_if(schemas, [&](const SectionSchema& schema) { return schema.name != "parallel"; });
  PluginHost host({});
  const ResolvedConfig config = resolve(ConfigDocument::parse("[parallel]\n" + text, "run.toml"), schemas, host);
  // The printed config resolves to the same values.
  const ResolvedConfig again = resolve(ConfigDocument::parse(config.to_toml(), "again.toml"), schemas, host);
  std::string sharding;
  for (const char* key : {"shard_optimizer", "shard_gradients", "shard_weights"}) {
    const auto& value = config.section("parallel").get<std::string>(key);
    CHECK(again.section("parallel").get<std::string>(key) == value);
    sharding += value + " ";
  }
  return sharding;
}

}  // namespace

TEST_CASE("parallel.zero sets the three keys of sharding that the config does not set") {
  CHECK(sharding_of("") == "none none none ");
  CHECK(sharding_of("zero = 0") == "none none none ");
  CHECK(sharding_of("zero = 1") == "ranks none none ");
  CHECK(sharding_of("zero = 2") == "ranks ranks none ");
  CHECK(sharding_of("zero = 3") == "ranks ranks ranks ");
  CHECK(sharding_of("zero = 3\nshard_gradients = \"none\"") == "ranks none ranks ");
  CHECK(sharding_of("zero = 1\nshard_weights = \"ranks\"") == "ranks none ranks ");
  CHECK(sharding_of("zero = 0\nshard_optimizer = \"ranks\"") == "ranks none none ");
  CHECK(fault("parallel", "zero = 4")
            .starts_with("run.toml:2:1: parallel.zero: out of range, found 4, expected an "
                         "integer from 0 to 3"));
  // Errors about what the preset sets point to its line.
  CHECK(fault("parallel", "zero = 2\nshard_optimizer = \"none\"")
            .starts_with("run.toml:2:1: parallel.shard_gradients: found \"ranks\" (by zero = 2) with "
                         "shard_optimizer = \"none\", expected \"none\", or parallel.shard_optimizer = \"ranks\""));
  CHECK(fault("parallel", "reduction = \"reproducible\"\nzero = 2")
            .starts_with("run.toml:3:1: parallel.shard_gradients: found \"ranks\" (by zero = 2) with reduction"));
}

TEST_CASE("keys that are no more say what serves their purpose") {
  CHECK(fault("parallel", "unhidden_steps = 3").find("unknown key: the time that transfers add") != std::string::npos);
}

TEST_CASE("sizes of a run stay within what devices and logs count with") {
  CHECK(fault("train", "micro_batch = 65536\nsequence = 32767") == "accepted");
  CHECK(fault("train", "micro_batch = 65536\nsequence = 32768") ==
        "run.toml:2:1: train.micro_batch: found 65536 x 32768 = 2147483648 tokens with sequence, expected at most "
        "2147483647");
  CHECK(fault("train", "micro_batch = 1152921504606846976").find("out of range") != std::string::npos);
  for (const char* text : {"accumulation = 9223372036854775807", "accumulation = 4611686018427387904",
                           "eval_batches = 4611686018427387904", "steps = 4294967296"}) {
    CAPTURE(text);
    CHECK(fault("train", text).find("out of range") != std::string::npos);
  }
  CHECK(fault("train", "micro_batch = 65536\nsequence = 32767\naccumulation = 1048576\nsteps = 2147483647")
            .find("run.toml:5:1: train.steps: found more tokens in 2147483647 steps of 1048576 x 2147418112 tokens") ==
        0);
  CHECK(fault("log", "directory = \"\"\nsinks = []") ==
        "run.toml:2:1: log.directory: found \"\", expected the directory of the run");
  CHECK(fault("memory", "recompute = [\"" + std::string(100000, 'x') + "\"]").size() < 400);
}

TEST_CASE("state is on the device or in a store that there is") {
  for (const std::string key : {"master", "moments", "gradients", "weights", "activations"}) {
    CHECK(fault("memory", key + " = \"device\"") == "accepted");
    const std::string text = fault("memory", key + " = \"host\"");
    CHECK(text.starts_with("run.toml:2:1: memory." + key + ": no such offload plugin: found \"host\""));
    CHECK(text.ends_with("`device` needs no plugin"));
    CHECK(fault("memory", key + " = \"device:40%,host\"") == text);
    CHECK(fault("memory", key + " = \"device:40%\"") ==
          "run.toml:2:1: memory." + key +
              ": not a share, found \"device:40%\", expected such as \"device:40%,host\": 1 to 99 percent of the "
              "layers, and the store of the others; for all or none of them name the device or the store");
  }
}

TEST_CASE("a budget is bytes or a size") {
  CHECK(fault("memory", "device_budget = 17179869184\nstores = []") == "accepted");
  CHECK(fault("memory", "device_budget = \"16GiB\"\nstores = []") == "accepted");
  CHECK(fault("memory", "stores = [\"host\"]") == "accepted");  // which no planner looks at without a budget
  for (const std::string store : {"device", "auto", "", "device:40%,host"})
    CHECK(fault("memory", "stores = [\"" + store + "\"]") ==
          "run.toml:2:1: memory.stores: not a store, found \"" + store +
              "\", expected ids of offload stores, such as \"host\"; for none use []");
  const std::string missing = fault("memory", "device_budget = \"16GiB\"\nstores = [\"host\"]");
  CHECK(missing.find("memory.stores: no such offload plugin: found \"host\"") != std::string::npos);
  CHECK(missing.find("needs no plugin") == std::string::npos);
  CHECK(fault("memory", "device_budget = \"16GiB\"\nstores = [\"host\", \"host\"]").find("found \"host\" twice") !=
        std::string::npos);
  CHECK(
      fault("memory", "device_budget = \"16 gigs\"") ==
      "run.toml:2:1: memory.device_budget: not a size, found \"16 gigs\", expected a size: bytes, or a number with B, "
      "KiB, MiB, GiB, TiB, KB, MB, GB or TB");
}
