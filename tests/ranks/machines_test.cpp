// Ranks in two levels: the ranks of a machine shard state, and machines have copies of it. Here all are on one.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "ranks/rank_group.h"

using namespace quern;
using namespace quern::testing;

namespace {

Losses losses_of(const TinyFiles& files, const std::string& name, const Overrides& overrides) {
  const Outcome outcome = quern_train(files, with(overrides, {files.run(name)}));
  INFO(outcome.err);
  CHECK(outcome.code == 0);
  CHECK(outcome.err.empty());
  return logged_losses(files.at(name));
}

Overrides steps_of(const std::string& precision) {
  return {"train.steps=6",        "train.accumulation=4",      "train.eval_every=3",
          "checkpoint.every=3",   "checkpoint.export=true",    "parallel.check_every=2",
          "schedule.id=constant", "precision.id=" + precision, "device.cpu.streams=shuffled"};
}

Overrides on_machines(int ranks, int machines, int zero) {
  return {"parallel.ranks=" + std::to_string(ranks), "parallel.machines=" + std::to_string(machines),
          "parallel.communicator=memcpy", "parallel.zero=" + std::to_string(zero)};
}

std::int64_t tensor_files(const std::string& run) {
  std::int64_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(run + "/checkpoints/step-00000006"))
    count += entry.path().extension() == ".safetensors" ? 1 : 0;
  return count;
}

}  // namespace

TEST_CASE("two machines of two ranks learn what one rank learns, and resume on another number of either") {
  struct Case {
    const char* precision;
    double tolerance;
    int zero;
  };
  for (const Case& c :
       {Case{"fp32", 1e-5, 0}, {"fp32", 1e-5, 3}, {"bf16", 2e-2, 1}, {"e4m3", 5e-2, 2}, {"e4m3", 5e-2, 3}}) {
    CAPTURE(c.precision);
    CAPTURE(c.zero);
    const TinyFiles files;
    const Overrides numbers = steps_of(c.precision), four = with(numbers, on_machines(4, 2, c.zero));
    const Losses one = losses_of(files, "one", numbers), all = losses_of(files, "four", four);
    REQUIRE(all.size() == one.size());
    for (const auto& [step, loss] : one) CHECK(all.at(step) == doctest::Approx(loss).epsilon(c.tolerance));
    CHECK(tensor_files(files.at("four")) == 2);
    losses_of(files, "again", with(four, {"train.steps=3", "device.cpu.shuffle_seed=7"}));
    CHECK(losses_of(files, "again", four) == all);
    CHECK(newest_tensors(files.at("again")) == newest_tensors(files.at("four")));
    losses_of(files, "fewer", with(four, {"train.steps=3"}));
    const Losses fewer = losses_of(files, "fewer", with(numbers, on_machines(2, 1, c.zero)));
    for (const auto& [step, loss] : one) CHECK(fewer.at(step) == doctest::Approx(loss).epsilon(c.tolerance));
    losses_of(files, "more", with(numbers, {"train.steps=3"}));
    const Losses more = losses_of(files, "more", four);
    for (const auto& [step, loss] : one) CHECK(more.at(step) == doctest::Approx(loss).epsilon(c.tolerance));
  }
}

TEST_CASE("machines reach each other by mpi, their ranks by memcpy") {
  if (!has_mpi()) return;
  const TinyFiles files;
  const Overrides four = with(steps_of("bf16"), on_machines(4, 2, 3));
  const Losses memcpy = losses_of(files, "memcpy", four);
  CHECK(losses_of(files, "mpi", with(four, {"parallel.across=mpi"})) == memcpy);
  CHECK(newest_tensors(files.at("mpi")) == newest_tensors(files.at("memcpy")));
}

TEST_CASE("a rank that is killed is named, on whichever machine") {
  const TinyFiles files;
  const Overrides endless = with(steps_of("fp32"), {"train.steps=100000", "checkpoint.every=0", "train.eval_every=0"});
  Group group(4, files, with(endless, on_machines(4, 2, 1)));
  while (group.running() && events(files.at("run"), "step").size() < 3)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(group.running());
  group[3].signal(SIGKILL);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(group[rank].wait() == 6);
    INFO(group[rank].err());
    CHECK(has(group[rank].err(), "rank 3"));
  }
}

TEST_CASE("a machine whose shard of a weight is corrupted is found by the same shard of another") {
  const TinyFiles files;
  const Overrides four = with(with(steps_of("bf16"), on_machines(4, 2, 3)),
                              {"train.steps=100000", "checkpoint.every=0", "train.eval_every=0"});
  const ConfiguredRun run(ConfigDocument::read(files.config(), four));
  const Plan plan = make_plan(run.session.parts(), run.session.plan_options());
  const auto shard = std::find_if(plan.tensors.begin(), plan.tensors.end(), [](const PlannedTensor& tensor) {
    return tensor.owner == TensorOwner::master && !tensor.whole.empty();
  });
  REQUIRE(shard != plan.tensors.end());
  Group group(4, files, four);
  while (group.running() && events(files.at("run"), "step").size() < 3)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(group.running());
  flip_bit(arena_of(group[2], plan.device_bytes), shard->place().offset + 2);  // the highest of a mantissa
  CHECK(group.wait() == group.all(6));
  INFO(group[0].err());
  CHECK(has(group[0].err(),
            "the shards of weights of ranks 0, 2 differ from the other ranks', first " + shard->parameter));
}

TEST_CASE("groups that are no machines of several ranks are refused") {
  const TinyFiles files;
  auto refused = [&](const Overrides& overrides, const std::vector<std::string>& texts) {
    const Outcome outcome = quern_train(files, with(steps_of("fp32"), overrides));
    INFO(outcome.err);
    CHECK(outcome.code == 2);
    for (const std::string& text : texts) CHECK(has(outcome.err, text));
  };
  refused(on_machines(4, 3, 1), {"parallel.machines", "found 3 with 4 ranks", "a divisor of parallel.ranks"});
  refused(on_machines(2, 2, 1), {"found 2 with 2 ranks"});
  refused(with(on_machines(4, 2, 1), {"parallel.reduction=reproducible"}), {"reproducible"});
  refused(with(on_machines(2, 1, 1), {"parallel.across=mpi"}), {"parallel.across", "machines of 2 or more"});
}

TEST_CASE("a plan knows whether some ranks have a micro-batch less than others") {
  const TinyFiles files;
  for (const int accumulation : {3, 4}) {
    const ConfiguredRun run(ConfigDocument::read(
        files.config(), with(steps_of("fp32"), {"parallel.ranks=2", "parallel.communicator=memcpy",
                                                "train.accumulation=" + std::to_string(accumulation)})));
    CHECK(run.session.plan_options().accumulation == 2);
    CHECK(run.session.plan_options().uneven == (accumulation == 3));
  }
}

TEST_CASE("sums of a model's states refuse micro-batches that ranks would run twice") {
  const TinyFiles files;
  const Overrides stateful =
      with(steps_of("fp32"), {"model.id=bad_state", "checkpoint.export=false",
                              "model.path=" QUERN_BUILD_DIR "/tests/conformance/model/libquern_bad_state.so"});
  auto run = [&](int zero, int accumulation) {
    return quern_train(files, with(stateful, {"parallel.ranks=2", "parallel.communicator=memcpy",
                                              "parallel.zero=" + std::to_string(zero),
                                              "train.accumulation=" + std::to_string(accumulation)}));
  };
  // With its shards over the ranks, the rank that has fewer micro-batches runs its last one again.
  const Outcome refused = run(2, 3);
  INFO(refused.err);
  CHECK(refused.code == 2);
  CHECK(has(refused.err, "train.accumulation: sums of the model's states would have micro-batches twice"));
  CHECK(has(refused.err, "found 3, expected a multiple of 2, parallel.ranks; or set shard_gradients"));
  for (const auto& [zero, accumulation] : {std::pair{2, 4}, {1, 3}}) {
    const Outcome trained = run(zero, accumulation);
    INFO(trained.err);
    CHECK(trained.code == 0);
  }
}
