// Several GPUs train as one does. With fewer the cases report that they were skipped.
#include <csignal>
#include <string>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "plugin/plugin_host.h"
#include "quern/device.h"
#include "rank_group.h"

using namespace quern;
using namespace quern::testing;

namespace {

const Overrides kOnGpus{
    "device.id=cuda",     "device.cuda.matmul_candidates=1", "train.accumulation=4", "train.steps=6",
    "checkpoint.every=3", "parallel.check_every=2",          "schedule.id=constant"};

bool has_gpus(int count) {
  PluginHost host(PluginHost::standard_folders());
  const int units = host.create<Device>("cuda", default_values(host.require("device", "cuda").options))->traits().units;
  if (units < count) MESSAGE("skipped: " << count << " GPUs are wanted, found " << units);
  return units >= count;
}

Overrides on_gpus(int ranks, const std::string& communicator) {
  return with(with(kOnGpus, of_ranks(ranks, "ranks")),
              {"parallel.communicator=" + communicator, "parallel.timeout=20"});
}

Losses losses_of(const TinyFiles& files, const std::string& name, const Overrides& overrides) {
  const Outcome outcome = quern_train(files, with(overrides, {files.run(name)}));
  INFO(outcome.err);
  CHECK(outcome.code == 0);
  return logged_losses(files.at(name));
}

void learn_alike(int ranks, const std::string& communicator) {
  if (!has_gpus(ranks)) return;
  for (const std::string precision : {"bf16", "e4m3"}) {
    CAPTURE(precision);
    TinyFiles files;
    const Overrides format{"precision.id=" + precision};
    const Losses one = losses_of(files, "one", with(kOnGpus, format));
    const Overrides several = with(on_gpus(ranks, communicator), format);
    const Losses losses = losses_of(files, "several", several);
    REQUIRE(losses.size() == one.size());
    for (const auto& [step, loss] : one)
      CHECK(losses.at(step) == doctest::Approx(loss).epsilon(precision == "bf16" ? 2e-2 : 5e-2));
    losses_of(files, "again", with(several, {"train.steps=3"}));
    CHECK(losses_of(files, "again", several) == losses);
    CHECK(newest_tensors(files.at("again")) == newest_tensors(files.at("several")));
  }
}

void have_bits_of_whole(int ranks, const std::string& communicator) {
  const Overrides weights{"parallel.shard_weights=ranks"},
      both = with(weights, {"parallel.shard_gradients=ranks"}),
      stores = with(both, {"memory.master=host", "memory.moments=host", "memory.activations=host",
                           "memory.weights=host", "memory.gradients=host"});
  if (!has_gpus(ranks)) return;
  for (const std::string precision : {"bf16", "e4m3"}) {
    CAPTURE(precision);
    TinyFiles files;
    const Overrides numbers = with(on_gpus(ranks, communicator), {"precision.id=" + precision});
    const Losses whole = losses_of(files, "whole", numbers);
    CHECK(losses_of(files, "weights", with(numbers, weights)) == whole);
    CHECK(newest_tensors(files.at("weights")) == newest_tensors(files.at("whole")));
    // Several micro-batches of a rank are summed in another order.
    const Losses several = losses_of(files, "both", with(numbers, both));
    REQUIRE(several.size() == whole.size());
    for (const auto& [step, loss] : whole)
      CHECK(several.at(step) == doctest::Approx(loss).epsilon(precision == "bf16" ? 2e-2 : 5e-2));
    CHECK(losses_of(files, "stores", with(numbers, stores)) == several);
    CHECK(newest_tensors(files.at("stores")) == newest_tensors(files.at("both")));
    losses_of(files, "resumed", with(with(numbers, both), {"train.steps=3"}));
    CHECK(losses_of(files, "resumed", with(numbers, both)) == several);
    CHECK(newest_tensors(files.at("resumed")) == newest_tensors(files.at("both")));
    // NCCL's order of more than two ranks' sums is its own.
    if (ranks > 2 && communicator == "nccl") continue;
    const Overrides one_each = with(numbers, {"train.accumulation=" + std::to_string(ranks)});
    const Losses of_one = losses_of(files, "one", one_each);
    CHECK(losses_of(files, "one sharded", with(one_each, both)) == of_one);
    CHECK(newest_tensors(files.at("one sharded")) == newest_tensors(files.at("one")));
  }
}

}  // namespace

TEST_CASE("two GPUs learn what one learns, by nccl, and their repeats and resumes have equal bits") {
  learn_alike(2, "nccl");
}
TEST_CASE("two GPUs learn what one learns, by memcpy, and their repeats and resumes have equal bits") {
  learn_alike(2, "memcpy");
}
TEST_CASE("four GPUs learn what one learns, by nccl, and their repeats and resumes have equal bits") {
  learn_alike(4, "nccl");
}
TEST_CASE("four GPUs learn what one learns, by memcpy, and their repeats and resumes have equal bits") {
  learn_alike(4, "memcpy");
}

// Beside stores and in resumed runs too.
TEST_CASE("weights and gradients sharded over two GPUs by nccl have the bits of whole ones") {
  have_bits_of_whole(2, "nccl");
}
TEST_CASE("weights and gradients sharded over two GPUs by memcpy have the bits of whole ones") {
  have_bits_of_whole(2, "memcpy");
}
TEST_CASE("weights and gradients sharded over four GPUs by nccl have the bits of whole ones") {
  have_bits_of_whole(4, "nccl");
}
TEST_CASE("weights and gradients sharded over four GPUs by memcpy have the bits of whole ones") {
  have_bits_of_whole(4, "memcpy");
}

TEST_CASE("a rank that is killed on its GPU is named, and all leave") {
  if (!has_gpus(2)) return;
  for (const std::string communicator : {"nccl", "memcpy"}) {
    CAPTURE(communicator);
    TinyFiles files;
    const Overrides endless =
        with(on_gpus(2, communicator), {"train.steps=1000000", "train.eval_every=0", files.run("run")});
    Child starter(train_arguments(files, endless));
    while (starter.running() && events(files.at("run"), "step").size() < 3) ::usleep(1000);
    const std::vector<pid_t> ranks = descendants(starter.process());
    ::kill(rank_among(ranks, 1), SIGKILL);
    CHECK(starter.wait() == 6);
    CHECK(has(starter.err(), "rank 1"));
    for (const pid_t rank : ranks) CHECK_FALSE(runs(rank));
  }
}

TEST_CASE("ranks that would share a GPU are refused") {
  if (!has_gpus(1) || has_gpus(2)) return;
  TinyFiles files;
  const Overrides overrides = with(on_gpus(2, "memcpy"), {files.run("run")});
  check_fails(quern_train(files, overrides), 2,
              {"its cuda device is already used by rank 0", "one of its own for each rank"});
}
