// A run of several ranks: the losses of one rank that takes the same micro-batches, repeats and resumes with equal
// bits, and one clear end when a rank fails.
#include <bit>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <unistd.h>

#include <doctest/doctest.h>

#include "conformance/communicator/rank_processes.h"
#include "end_to_end.h"
#include "quern/run.h"
#include "ranks/rank_group.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;

namespace {

/// Steps of four micro-batches, which ranks share.
const Overrides kSteps{"train.steps=6",      "train.accumulation=4",   "train.eval_every=3",
                       "checkpoint.every=3", "checkpoint.export=true", "parallel.check_every=2"};

/// With streams that take their work in a random order.
const Overrides kShardedWeights{"parallel.shard_weights=ranks", "device.cpu.streams=shuffled"};

Losses losses_of(const TinyFiles& files, const std::string& name, const Overrides& overrides) {
  const Outcome outcome = quern_train(files, with(overrides, {files.run(name)}));
  INFO(outcome.err);
  CHECK(outcome.code == 0);
  CHECK(outcome.err.empty());
  return logged_losses(files.at(name));
}

}  // namespace

// Streams take their work in a random order, as late as they may. Every pair of two columns' values is there.
TEST_CASE(
    "ranks learn what one rank learns from the same micro-batches, and their repeats and resumes have equal bits") {
  struct Case {
    const char* precision;
    double tolerance;  // sums in another order; in 8 bits a scale is also known to a rank from its own micro-batches
    int ranks;
    const char* sharding;
    const char* documents;
    int accumulation;
  };
  for (const Case& c : {Case{"fp32", 1e-5, 2, "ranks", "joined", 5},
                        {"fp32", 1e-5, 3, "none", "masked", 6},
                        {"fp32", 1e-5, 4, "ranks", "masked", 4},
                        {"bf16", 2e-2, 2, "none", "masked", 4},
                        {"bf16", 2e-2, 3, "ranks", "joined", 4},
                        {"bf16", 2e-2, 4, "none", "joined", 5},
                        {"e4m3", 5e-2, 2, "ranks", "masked", 5},
                        {"e4m3", 5e-2, 3, "ranks", "masked", 6},
                        {"e4m3", 5e-2, 4, "none", "joined", 4},
                        {"int8", 5e-2, 2, "ranks", "joined", 4}}) {
    CAPTURE(c.precision);
    CAPTURE(c.ranks);
    TinyFiles files;
    const Overrides numbers =
        with(kSteps, {"precision.id=" + std::string(c.precision), "data.documents=" + std::string(c.documents),
                      "data.tokens.separator=5", "train.accumulation=" + std::to_string(c.accumulation),
                      "schedule.id=constant"});
    auto shuffled = [&](const char* seed) {
      return with(with(numbers, of_ranks(c.ranks, c.sharding)),
                  {"device.cpu.streams=shuffled", "device.cpu.shuffle_seed=" + std::string(seed)});
    };
    const Losses one = losses_of(files, "one", numbers);
    const Losses several = losses_of(files, "several", shuffled("1"));
    REQUIRE(several.size() == one.size());
    for (const auto& [step, loss] : one) CHECK(several.at(step) == doctest::Approx(loss).epsilon(c.tolerance));
    losses_of(files, "again", with(shuffled("2"), {"train.steps=3"}));
    CHECK(losses_of(files, "again", shuffled("3")) == several);
    CHECK(newest_tensors(files.at("again")) == newest_tensors(files.at("several")));
  }
}

TEST_CASE("reproducible sums give the bits of one rank on any number of ranks") {
  struct Case {
    const char* precision;
    int accumulation;
    std::vector<std::pair<int, const char*>> groups;  ///< ranks, sharding
  };
  for (const Case& c : {Case{"fp32", 8, {{2, "ranks"}, {4, "ranks"}, {4, "none"}}},
                        {"bf16", 7, {{2, "none"}, {4, "ranks"}}},
                        {"bf16", 6, {{1, "none"}, {2, "ranks"}, {3, "none"}}},
                        {"e4m3", 4, {{2, "ranks"}, {4, "ranks"}}},
                        {"int8", 4, {{2, "ranks"}}}}) {
    CAPTURE(c.precision);
    TinyFiles files;
    Overrides numbers = with(kSteps, {"precision.id=" + std::string(c.precision), "parallel.reduction=reproducible",
                                      "train.accumulation=" + std::to_string(c.accumulation), "schedule.id=constant"});
    if (std::string(c.precision) == "e4m3")
      for (const char* what : {"activation", "gradient"})
        numbers.push_back("precision.e4m3." + std::string(what) + "_scaling=current");
    if (std::string(c.precision) == "int8") numbers.push_back("precision.int8.gradient_rounding=stochastic");
    const Losses one = losses_of(files, "one", numbers);
    for (const auto& [ranks, sharding] : c.groups) {
      CAPTURE(ranks);
      const std::string name = std::to_string(ranks) + sharding;
      const Overrides several = with(numbers, of_ranks(ranks, sharding));
      losses_of(files, name, with(several, {"train.steps=3", "device.cpu.streams=shuffled"}));
      CHECK(losses_of(files, name, several) == one);
      CHECK(newest_tensors(files.at(name)) == newest_tensors(files.at("one")));
      const auto each = static_cast<unsigned>(c.accumulation / ranks);
      if (std::string(sharding) == "none" || c.accumulation % ranks != 0 || !std::has_single_bit(each)) continue;
      CHECK(losses_of(files, name + " weights", with(several, kShardedWeights)) == one);
      CHECK(newest_tensors(files.at(name + " weights")) == newest_tensors(files.at("one")));
    }
  }
}

TEST_CASE("what cannot be summed reproducibly is refused, with what to set") {
  TinyFiles files;
  auto refused = [&](const Overrides& more, const std::vector<std::string>& parts) {
    check_fails(quern_train(files, with(with(kSteps, {"parallel.reduction=reproducible", files.run("refused")}), more)),
                2, parts);
  };
  refused({"precision.id=e4m3"}, {"delayed scales", "set activation_scaling and gradient_scaling"});
  refused({"optimizer.gradient=bf16"}, {"optimizer.gradient", "need fp32"});
  refused(with(of_ranks(3, "none"), {"train.accumulation=4"}), {"without micro-batches", "such as 6"});
  refused(with(of_ranks(3, "ranks"), {"train.accumulation=6"}), {"parallel.ranks", "1, 2, 4 or 8"});
  refused(with(with(of_ranks(2, "ranks"), kShardedWeights), {"train.accumulation=6"}),
          {"as many micro-batches on each rank", "such as 8"});
  refused(with(of_ranks(2, "ranks"), {"parallel.shard_gradients=ranks"}), {"parallel.shard_gradients", "reproducible"});
}

TEST_CASE("as many ranks as micro-batches, sharded or not, make the same sums") {
  for (const char* precision : {"bf16", "int8"}) {  // int8's copies are made of gathered masters
    CAPTURE(precision);
    TinyFiles files;
    const Overrides numbers = with(kSteps, {"precision.id=" + std::string(precision)});
    const Losses whole = losses_of(files, "whole", with(numbers, of_ranks(4, "none")));
    CHECK(losses_of(files, "shards", with(numbers, of_ranks(4, "ranks"))) == whole);
    CHECK(newest_tensors(files.at("shards")) == newest_tensors(files.at("whole")));
  }
}

TEST_CASE("shards in a store of each rank have the bits of those on the device, and resume either way") {
  struct Case {
    const char* precision;
    const char* master;
    int ranks;
    const char* sharding;
  };
  for (const Case& c : {Case{"fp32", "fp32", 2, "ranks"},
                        {"bf16", "fp32", 3, "ranks"},
                        {"bf16", "fp32", 2, "none"},
                        {"e4m3", "fp32", 2, "ranks"},
                        {"e4m3", "bf16", 3, "ranks"},
                        {"int8", "fp32", 2, "ranks"}}) {
    CAPTURE(c.precision);
    CAPTURE(c.ranks);
    TinyFiles files;
    const Overrides numbers = with(with(kSteps, of_ranks(c.ranks, c.sharding)),
                                   {"precision.id=" + std::string(c.precision),
                                    "optimizer.master=" + std::string(c.master), "schedule.id=constant"});
    const Overrides stores = {"memory.master=host", "memory.moments=host", "device.cpu.streams=shuffled"};
    const Losses resident = losses_of(files, "resident", numbers);
    CHECK(losses_of(files, "stores", with(numbers, stores)) == resident);
    CHECK(losses_of(files, "stores", with(numbers, stores)) == resident);  // when nothing is left to do
    CHECK(newest_tensors(files.at("stores")) == newest_tensors(files.at("resident")));
    losses_of(files, "moved", with(with(numbers, stores), {"train.steps=3"}));
    CHECK(losses_of(files, "moved", numbers) == resident);
    CHECK(newest_tensors(files.at("moved")) == newest_tensors(files.at("resident")));
  }
}

TEST_CASE("ranks that deferred an update roll back together") {
  TinyFiles files;
  const Outcome outcome = quern_train(
      files, with(of_ranks(2, "ranks"), {"memory.master=host", "memory.moments=host", "train.accumulation=2",
                                         "train.steps=50", "optimizer.learning_rate=1e30", "checkpoint.every=0",
                                         "guard.non_finite=roll_back", "guard.limit=3", files.run("run")}));
  CAPTURE(outcome.err);
  CHECK(outcome.code == 5);
  CHECK(outcome.err.find("after guard.limit = 3 such steps") != std::string::npos);
  CHECK(events(files.at("run"), "non_finite").size() >= 3);  // rank 1 may end the run before rank 0 logs the last one
}

TEST_CASE("weights and gradients of which ranks keep shards have the bits of whole ones, beside stores too") {
  struct Case {
    const char* precision;
    const char* master;
    int ranks;
    Overrides more = {};
  };
  const Overrides both = with(kShardedWeights, {"parallel.shard_gradients=ranks"}),
                  stores = with(both, {"memory.master=host", "memory.moments=host", "memory.activations=host",
                                       "memory.weights=host", "memory.gradients=host"});
  for (const Case& c : {Case{"fp32", "fp32", 2, {"train.accumulation=3"}},
                        {"bf16", "fp32", 4, {"memory.recompute=[\"ffn\", \"att\"]"}},
                        {"bf16", "bf16", 2, {"model.llama.tie_word_embeddings=false"}},
                        {"e4m3", "fp32", 3},
                        {"e4m3", "bf16", 4, {"train.accumulation=6", "memory.recompute=[\"block\"]"}},
                        {"int8", "fp32", 2, {"model.llama.tie_word_embeddings=false", "log.scales_every=2"}}}) {
    CAPTURE(c.precision);
    CAPTURE(c.ranks);
    TinyFiles files;
    const Overrides numbers =
        with(with(with(kSteps, of_ranks(c.ranks, "ranks")), c.more),
             {"precision.id=" + std::string(c.precision), "optimizer.master=" + std::string(c.master), "sample.every=3",
              "sample.max_tokens=3", "sample.prompts=[\"5,6\"]"});
    auto same = [&](const char* run, const char* as) {
      CHECK(newest_tensors(files.at(run)) == newest_tensors(files.at(as)));
      for (const char* kind : {"sample", "eval", "scale"})
        CHECK(events(files.at(run), kind) == events(files.at(as), kind));
    };
    const Losses whole = losses_of(files, "whole", numbers);
    CHECK(losses_of(files, "weights", with(numbers, kShardedWeights)) == whole);
    same("weights", "whole");
    // A rank's micro-batches are summed over ranks one by one: other sums, unless it has one of a step.
    const Overrides one_each = with(numbers, {"train.accumulation=" + std::to_string(c.ranks)});
    const Losses of_one = losses_of(files, "one", one_each);
    CHECK(losses_of(files, "both", with(one_each, both)) == of_one);
    same("both", "one");
    CHECK(losses_of(files, "stores", with(one_each, stores)) == of_one);
    same("stores", "one");
    const Losses several = losses_of(files, "several", with(numbers, both));
    REQUIRE(several.size() == whole.size());
    for (const auto& [step, loss] : whole) CHECK(several.at(step) == doctest::Approx(loss).epsilon(5e-2));
    CHECK(losses_of(files, "several stores", with(numbers, stores)) == several);
  }
}

TEST_CASE("a run with sharded weights and gradients resumes on other numbers of ranks, sharded or not") {
  TinyFiles files;
  const Overrides numbers =
      with(kSteps, {"precision.id=bf16", "schedule.id=constant", "optimizer.master=bf16", "checkpoint.every=1"});
  const Overrides both = with(kShardedWeights, {"parallel.shard_gradients=ranks"});
  std::int64_t steps = 0;
  for (const int ranks : {4, 2, 3, 1}) {
    CAPTURE(ranks);
    const Overrides part = with(with(numbers, of_ranks(ranks, "ranks")), {"train.steps=" + std::to_string(steps += 2)});
    // The same shards, and whole gradients: the same bits. And the other one's files.
    losses_of(files, "whole", part);
    const Losses losses = losses_of(files, "weights", with(part, kShardedWeights));
    CHECK(losses == logged_losses(files.at("whole")));
    CHECK(newest_tensors(files.at("weights")) == newest_tensors(files.at("whole")));
    CHECK(losses_of(files, "both", with(part, ranks == 3 ? Overrides{} : both)).size() == losses.size());
  }
}

// Every pair of values of two of: stage, precision, communicator, ranks, stores.
TEST_CASE(
    "each stage of ZeRO has the bits of whole state, in each precision, over each communicator, and with stores") {
  const char* const precisions[] = {"fp32", "bf16", "e4m3", "int8"};
  const std::string communicators[] = {"memcpy", has_mpi() ? "mpi" : "memcpy"};
  for (int precision = 0; precision < 4; ++precision)
    for (int number = 0; number < 3; ++number) {
      const int ranks = 2 + number, stage = 1 + (precision + number) % 3, stores = (precision + 2 * number) % 3;
      CAPTURE(precision);
      CAPTURE(ranks);
      CAPTURE(stage);
      CAPTURE(stores);
      TinyFiles files;
      const Overrides numbers =
          with(of_ranks(ranks, "none"),
               {"precision.id=" + std::string(precisions[precision]), "train.accumulation=" + std::to_string(ranks),
                "train.steps=3", "train.eval_every=3", "checkpoint.every=2", "checkpoint.export=false"});
      Overrides sharded = with(numbers, {"parallel.communicator=" + communicators[(precision + number) % 2],
                                         "device.cpu.streams=shuffled", "parallel.zero=" + std::to_string(stage)});
      std::erase(sharded, "parallel.shard_optimizer=none");  // it would win
      if (stores > 0) sharded = with(sharded, {"memory.master=host", "memory.moments=host"});
      if (stores > 1) sharded.push_back("memory.activations=host");
      if (stores > 1 && stage > 1) sharded.push_back("memory.gradients=host");
      if (stores > 1 && stage > 2) sharded.push_back("memory.weights=host");
      CHECK(losses_of(files, "sharded", sharded) == losses_of(files, "whole", numbers));
      CHECK(newest_tensors(files.at("sharded")) == newest_tensors(files.at("whole")));
    }
}

TEST_CASE("mpi, whose ranks mpirun starts, alone and beside memcpy gives the bits of memcpy") {
  if (!has_mpi()) return;
  for (const char* precision : {"fp32", "bf16", "e4m3"}) {
    CAPTURE(precision);
    TinyFiles files;
    const Overrides two = with(with(kSteps, {"precision.id=" + std::string(precision)}), of_ranks(2, "ranks"));
    const Losses expected = losses_of(files, "memcpy", two);
    const Overrides mpi = with(two, {"parallel.communicator=mpi", "device.cpu.streams=shuffled"});
    CHECK(losses_of(files, "mpi", mpi) == expected);
    CHECK(newest_tensors(files.at("mpi")) == newest_tensors(files.at("memcpy")));
    CHECK(losses_of(files, "direct", with(mpi, {"parallel.mpi.staging=none"})) == expected);
    CHECK(newest_tensors(files.at("direct")) == newest_tensors(files.at("memcpy")));
    CHECK(losses_of(files, "both", with(mpi, {"parallel.collectives.all_gather=memcpy"})) == expected);
    CHECK(newest_tensors(files.at("both")) == newest_tensors(files.at("memcpy")));
    const Overrides sharded{"parallel.shard_weights=ranks", "parallel.shard_gradients=ranks", "train.accumulation=3"};
    CHECK(losses_of(files, "mpi sharded", with(mpi, sharded)) ==
          losses_of(files, "memcpy sharded", with(two, sharded)));
    CHECK(newest_tensors(files.at("mpi sharded")) == newest_tensors(files.at("memcpy sharded")));
    const Overrides stores{"memory.master=host", "memory.moments=host"};  // whose update is deferred
    CHECK(losses_of(files, "mpi stores", with(mpi, stores)) == expected);
    CHECK(newest_tensors(files.at("mpi stores")) == newest_tensors(files.at("memcpy")));
  }
}

TEST_CASE("a finished run of several ranks keeps its weights in memory") {
  TinyFiles files;
  const auto ranks = conformance::run_ranks(2, 60, [&](int rank) -> std::string {
    for (const char* name : {"QUERN_RANK", "QUERN_LOCAL_RANK"}) ::setenv(name, std::to_string(rank).c_str(), 1);
    for (const char* name : {"QUERN_RANKS", "QUERN_LOCAL_RANKS"}) ::setenv(name, "2", 1);
    TrainingRun run(files.config(), with(with(kSteps, of_ranks(2, "none")), {"log.sinks=[]", files.run("run")}));
    RunRequests requests;
    run.open_for_training(requests);
    const RunResult result = run.train();
    if (run.position().step != 6 || !result.finished) return "not finished";
    const auto weights = run.read(run.tensors()[0].name);
    run.save();
    return weights.empty() || run.read(run.tensors()[0].name) != weights ? "changed" : "kept";
  });
  for (const conformance::RankOutcome& rank : ranks) CHECK(rank.text == "kept");
}

TEST_CASE("a sharded tensor is read and written as a whole") {
  TinyFiles files;
  const auto ranks = conformance::run_ranks(2, 60, [&](int rank) -> std::string {
    for (const char* name : {"QUERN_RANK", "QUERN_LOCAL_RANK"}) ::setenv(name, std::to_string(rank).c_str(), 1);
    for (const char* name : {"QUERN_RANKS", "QUERN_LOCAL_RANKS"}) ::setenv(name, "2", 1);
    TrainingRun run(files.config(), with(with(kSteps, of_ranks(2, "ranks")), {"log.sinks=[]", files.run("run")}));
    RunRequests requests;
    run.open_for_training(requests);
    run.start();
    const std::string name = "moment1/embedding.weight";  // (64, 32), half of it on each rank
    std::vector<float> values(64 * 32);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    run.write(name, values);
    const bool whole = run.read(name) == values;
    run.train();
    return whole ? "whole" : "in part";
  });
  for (const conformance::RankOutcome& rank : ranks) CHECK(rank.text == "whole");
}

TEST_CASE("a key that moved to a command is refused with its name") {
  TinyFiles files;
  check_fails(quern_train(files, with(of_ranks(2, "none"), {"train.accumulation=2", "parallel.unhidden_steps=2"})), 2,
              {"parallel.unhidden_steps: unknown key", "quern bench transfers FILE"});
}

TEST_CASE("a run resumes with the bits of the straight one, and on another number of ranks") {
  TinyFiles files;
  const Overrides numbers = with(kSteps, {"precision.id=e4m3", "optimizer.master=bf16", "schedule.id=constant"});
  const Overrides two = with(numbers, of_ranks(2, "ranks"));
  losses_of(files, "straight", two);
  losses_of(files, "halves", with(two, {"train.steps=3"}));
  losses_of(files, "halves", two);
  CHECK(newest_tensors(files.at("halves")) == newest_tensors(files.at("straight")));
  losses_of(files, "fewer", with(numbers, {"train.steps=3"}));
  const Losses more = losses_of(files, "fewer", with(numbers, of_ranks(3, "ranks")));
  CHECK(more.size() == 6);
  const Losses alone = losses_of(files, "fewer", with(numbers, {"train.steps=8"}));
  CHECK(alone.size() == 8);
}

TEST_CASE("a stop that reaches one rank stops all, and all steps are saved") {
  // Also in evaluations, in which all ranks gather weights.
  for (const Overrides& sharded : {Overrides{"train.eval_every=0"}, with(kShardedWeights, {"train.eval_every=1"})}) {
    TinyFiles files;
    Group group(2, files,
                with(with(with(kSteps, of_ranks(2, "ranks")), sharded),
                     {"train.steps=100000", "checkpoint.every=0", files.run("stopped")}));
    while (group[0].running() && events(files.at("stopped"), "step").size() < 3) ::usleep(1000);
    group[1].signal(SIGTERM);
    CHECK(group.wait() == group.all(128 + SIGTERM));
    const Losses losses = logged_losses(files.at("stopped"));
    REQUIRE_FALSE(losses.empty());
    CHECK(newest_step(files.at("stopped")) == losses.rbegin()->first);
  }
}

TEST_CASE("when a rank is killed the others leave at once, and say which") {
  TinyFiles files;
  Group group(3, files,
              with(with(kSteps, of_ranks(3, "ranks")),
                   {"train.steps=100000", "train.eval_every=0", "checkpoint.every=0", files.run("killed")}));
  while (group[0].running() && events(files.at("killed"), "step").size() < 3) ::usleep(1000);
  group[1].signal(SIGKILL);
  CHECK(group.wait() == std::vector<int>{6, -SIGKILL, 6});
  CHECK(has(group[0].err(), "rank 1"));
  CHECK(has(group[2].err(), "rank 1"));
}

TEST_CASE("a rank whose memory is corrupted is named") {
  for (int ranks : {2, 3}) {
    CAPTURE(ranks);
    TinyFiles files;
    const Overrides overrides = with(with(kSteps, of_ranks(ranks, "none")),
                                     {"train.steps=100000", "train.eval_every=0", "checkpoint.every=0",
                                      "precision.id=fp32", "parallel.check_every=2", files.run("corrupted")});
    Group group(ranks, files, overrides);
    while (group[0].running() && events(files.at("corrupted"), "step").size() < 3) ::usleep(1000);
    flip_bit(arena_of(group[1], planned_bytes(files, overrides)),
             4096);  // of the first weight, which is at the beginning
    CHECK(group.wait() == group.all(6));
    CHECK(has(group[0].err(), std::string("the weights of ") + (ranks == 2 ? "ranks 0, 1" : "rank 1") +
                                  " differ from the other ranks', first embedding.weight"));
  }
}

TEST_CASE("a plugin whose library is missing ends all ranks, with the library's name") {
  TinyFiles files;
  ::setenv("QUERN_PLUGIN_PATH", QUERN_BUILD_DIR "/tests/bad_plugins", 1);
  const Overrides sinks = with(of_ranks(3, "none"), {"train.accumulation=3", "log.sinks=[\"missing_library\"]"});
  const Outcome outcome = quern_train(files, sinks);
  ::unsetenv("QUERN_PLUGIN_PATH");
  check_fails(outcome, 2, {"libquern_missing_library.so", "libquern_gone.so"});
}

TEST_CASE("more ranks than a communicator takes are refused before they are started") {
  TinyFiles files;
  const Outcome many = quern_train(files, with(of_ranks(65, "none"), {"train.accumulation=65"}));
  check_fails(many, 2, {"quern: error: --set parallel.ranks", "found 65, expected 64 at most"});
}

TEST_CASE("ranks that were not started alike are refused") {
  TinyFiles files;
  Group group(2, files, with(with(kSteps, of_ranks(3, "ranks")), {files.run("three")}));
  CHECK(group.wait() == group.all(2));
  CHECK(has(group.messages(), "not the number of ranks that torchrun started: found 3, expected 2"));
  Group odd(2, files, with(with(kSteps, of_ranks(2, "ranks")), {files.run("odd")}), {"train.seed=9"});
  CHECK(odd.wait() == odd.all(2));
  CHECK(has(odd[0].err(), "rank 0: rank 1: its config differs from rank 0's: found seed = 9, expected seed = "));
  CHECK(has(odd[1].err(), "quern: error: rank 1: its config differs from rank 0's"));
  // Files with a byte more are another build; a folder of plugins comes before quern's own.
  const std::filesystem::path other = files.at("other");
  std::filesystem::create_directories(other / "precision");
  std::filesystem::copy(QUERN_BUILD_DIR "/plugins/precision/libquern_fp32.so", other / "precision");
  std::ofstream(other / "precision/libquern_fp32.so", std::ios::app) << '\0';
  Group built(2, files, with(with(kSteps, of_ranks(2, "ranks")), {files.run("built")}), {}, [&](int rank) {
    if (rank == 1) ::setenv("QUERN_PLUGIN_PATH", other.c_str(), 1);
  });
  CHECK(built.wait() == built.all(2));
  CHECK(has(built.messages(), "rank 1: its build differs from rank 0's: found plugin fp32"));
  CHECK_FALSE(std::filesystem::exists(files.at("built") + "/log.jsonl"));
  const Outcome few = quern_train(files, with(of_ranks(2, "ranks"), {"train.accumulation=1", files.run("few")}));
  check_fails(few, 2, {"fewer micro-batches a step than ranks"});
}
