// Weights in 8 bits and fewer, with masters and without.
#include <doctest/doctest.h>

#include "checkpoint/checkpoint_store.h"
#include "end_to_end.h"
#include "hf/weight_files.h"
#include "optimizers/eval_loss.h"
#include "ranks/rank_group.h"

using namespace quern;
using namespace quern::testing;

namespace {

const Overrides kLowBit{"precision.id=low_bit", "model.llama.intermediate_size=64", "optimizer.learning_rate=0.01",
                        "train.accumulation=4"};
const Overrides kNoMasters = with(kLowBit, {"optimizer.master=none"});

std::pair<Losses, std::string> trained(const TinyFiles& files, const std::string& name, const Overrides& overrides) {
  const Outcome outcome = quern_train(files, with(overrides, {files.run(name)}));
  INFO(outcome.err);
  REQUIRE(outcome.code == 0);
  return {logged_losses(files.at(name)), newest_tensors(files.at(name))};
}

double last_loss(const TinyFiles& files, const std::string& name) {
  return events(files.at(name), "end").back().at("val_loss");
}

}  // namespace

TEST_CASE("every format and any placement of state trains, and its ranks agree") {
  for (const char* format : {"int8", "int4", "ternary"}) {
    CAPTURE(format);
    TinyFiles files;
    const std::string weights = std::string("precision.low_bit.weights=") + format;
    const Overrides run = with(kLowBit, {weights, "parallel.reduction=reproducible"});
    const auto want = trained(files, "one", run);
    CHECK(trained(files, "stores", with(run, {"memory.master=host", "memory.moments=host"})) == want);
    CHECK(trained(files, "ranks", with(run, of_ranks(2, "ranks"))) == want);
    CHECK(trained(files, "gathered", with(run, with(of_ranks(2, "ranks"), {"parallel.shard_weights=ranks"}))) == want);
    if (std::string(format) != "int4") {
      const Losses nearest = trained(files, "int8", with(run, {"precision.low_bit.activations=int8"})).first;
      CHECK(nearest != want.first);
      CHECK(trained(files, "drawn", with(run, {"precision.low_bit.activations=int8_stochastic"})).first != nearest);
    }
    CHECK(trained(files, "gradients", with(run, {"precision.low_bit.gradients=int8"})).first != want.first);
  }
}

TEST_CASE("int8 weights without masters train under any optimizer and resume with the same bits") {
  const Overrides drawn{"precision.low_bit.activations=int8_stochastic", "precision.low_bit.gradients=int8_stochastic"};
  for (const Overrides& more : {Overrides{"optimizer.id=adamw"}, with({"optimizer.id=adamw"}, drawn),
                                Overrides{"optimizer.id=lion"}, Overrides{"optimizer.id=sgd"}}) {
    CAPTURE(more);
    TinyFiles files;
    const Overrides run =
        with(kNoMasters,
             with(more, {"optimizer.adamw.moments=int8", "checkpoint.every=1", "parallel.reduction=reproducible"}));
    const auto want = trained(files, "whole", run);
    CHECK(want.first.rbegin()->second < want.first.begin()->second);
    CHECK(trained(files, "ranks", with(run, of_ranks(2, "none"))) == want);
    train_here(files, with(run, {files.run("stopped")}), 3);
    CHECK(trained(files, "stopped", with(run, {"memory.moments=host"})).second == want.second);
  }
}

TEST_CASE("checkpoints and exports hold int8 weights without masters exactly") {
  TinyFiles files;
  const Overrides run = with(kNoMasters, {"checkpoint.export_dtype=fp32"});
  trained(files, "run", run);
  const double last = last_loss(files, "run");
  CHECK(eval_loss(files, files.at("run"), run) == last);
  std::vector<std::string> notes;
  const Checkpoint checkpoint = checkpoint_at(files.at("run"), notes);
  const StoredTensor* weights = checkpoint.tensors.find("master/down.weight/1");
  REQUIRE(weights);
  CHECK(weights->type == StoredType::i8);
  std::vector<float> values(static_cast<std::size_t>(element_count(weights->extents)));
  read_weights(checkpoint, weights->name, 0, values);
  REQUIRE(quern_run({"export", files.at("run"), files.at("exported")}).code == 0);
  for (const char* folder : {"run/export", "exported"}) {
    const WeightFiles exported(files.at(folder));
    const std::string name = "model.layers.1.mlp.down_proj.weight";
    CHECK(exported.find(name).file->read_floats(name) == values);
    CHECK(eval_loss(files, files.at(folder), run) == doctest::Approx(last).epsilon(1e-5));
  }
}

TEST_CASE("a plan states bytes a parameter, and what int8 weights without masters are refused with") {
  TinyFiles files;
  auto plan = [&](const Overrides& overrides) {
    std::vector<std::string> words{"plan", files.config()};
    for (const std::string& setting : overrides) words.insert(words.end(), {"--set", setting});
    return quern_run(words);
  };
  const std::string text = plan(kNoMasters).out, key = "bytes a parameter";
  CAPTURE(text);
  REQUIRE(has(text, key));
  // Of the layers: 1, gradients 4, moments 8, and norms and scales of narrow rows.
  const double blocks = std::stod(text.substr(text.find(key) + key.size() + 13));
  CHECK(blocks > 13);
  CHECK(blocks < 13.3);
  check_fails(plan(with(kNoMasters, {"precision.id=bf16"})), 2,
              {"--set optimizer.master: optimizer.master: no weight", "low_bit"});
  check_fails(plan(with(kNoMasters, {"precision.low_bit.weights=int4"})), 2, {"optimizer.master"});
  check_fails(plan(with(kNoMasters, {"memory.master=host"})), 2, {"optimizer.master", "memory.master"});
  check_fails(plan(with(kNoMasters, of_ranks(2, "ranks"))), 2, {"optimizer.master", "parallel.shard_optimizer"});
  check_fails(plan(with(kLowBit, {"precision.low_bit.weights=int4", "precision.low_bit.activations=int8"})), 2,
              {"precision.low_bit.activations"});
}
