// Every optimizer learns the same wherever its state is, on any number of ranks and resumed; groups of parameters have
// optimizers of their own.
#include <doctest/doctest.h>

#include "conformance/check.h"
#include "optimizers/recipes.h"
#include "ranks/rank_group.h"
#include "run/options/run_schemas.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;

namespace {

Overrides run_of(const Recipe& recipe, const Overrides& more) {
  return with(with(recipe.overrides(), {"train.accumulation=4", "optimizer.learning_rate=0.01"}), more);
}

/// What a run of those settings leaves: losses and the last checkpoint.
std::pair<Losses, std::string> trained(const TinyFiles& files, const std::string& name, const Overrides& overrides) {
  const Outcome outcome = quern_train(files, with(overrides, {files.run(name)}));
  INFO(outcome.err);
  REQUIRE(outcome.code == 0);
  return {logged_losses(files.at(name)), newest_tensors(files.at(name))};
}

std::string groups(const std::string& tables) { return "train.groups=[" + tables + "]"; }

}  // namespace

TEST_CASE("the conformance kit holds for every optimizer") {
  for (const Recipe& recipe : kRecipes) {
    PluginHost host = run_host();
    const conformance::Report report =
        conformance::check(host, "optimizer/" + recipe.id, {.settings = recipe.settings});
    INFO(report.text());
    CHECK(report.count(conformance::Verdict::holds) == static_cast<int>(report.findings().size()));
  }
}

TEST_CASE("state in stores, updated in windows of a few rows, has the bits of state on the device") {
  PluginHost host = run_host();
  const auto device = cpu_device();
  const testkit::TinyModel model(testkit::TinyModelOptions{.width = 64, .ffn = 96});
  for (const Recipe& recipe : kRecipes) {
    CAPTURE(recipe.overrides());
    const auto optimizer = recipe.made(host);
    auto train = [&](PlanOptions options) {
      conformance::Trial trial(host, {model, *device, nullptr, optimizer.get()}, std::move(options));
      trial.train(0, 4);
      return std::pair(trial.plan().updates.size(), trial.state());
    };
    PlanOptions windows = stored_options(7, 1);
    windows.update_window_bytes = 8192;
    const auto want = train(stored_options(0, 1)), got = train(windows);
    CHECK(got.first > 8);
    CHECK(conformance::first_difference(got.second, want.second) == "");
  }
}

TEST_CASE("ranks that shard an optimizer agree with one rank that has all of it") {
  for (const Recipe& recipe : kRecipes) {
    CAPTURE(recipe.overrides());
    TinyFiles files;
    const Overrides sums{"parallel.reduction=reproducible"};
    const auto want = trained(files, "one", run_of(recipe, sums));
    for (const int ranks : {2, 4}) {
      const std::string name = std::to_string(ranks);
      CHECK(trained(files, "sharded " + name, with(run_of(recipe, sums), of_ranks(ranks, "ranks"))) == want);
    }
  }
}

TEST_CASE("a resumed run has the bits of one that was not stopped") {
  for (const Recipe& recipe : kRecipes) {
    CAPTURE(recipe.overrides());
    TinyFiles files;
    const Overrides overrides = run_of(recipe, {"checkpoint.every=1"});
    const auto want = trained(files, "whole", overrides);
    train_here(files, with(overrides, {files.run("stopped")}), 3);
    REQUIRE(newest_step(files.at("stopped")) == 3);
    const auto got = trained(files, "stopped", with(overrides, {"memory.moments=host"}));
    CHECK(got.second == want.second);
  }
}

TEST_CASE("groups of parameters have optimizers of their own") {
  TinyFiles files;
  const Overrides adamw = run_of({"adamw"}, {}), lion = run_of({"lion"}, {});
  auto with_groups = [](const Overrides& base, const std::string& tables) { return with(base, {groups(tables)}); };
  const auto want = trained(files, "adamw", adamw);
  CHECK(trained(files, "others", with_groups(lion, "{match=['*'], optimizer='adamw'}")).first == want.first);
  const auto mixed =
      trained(files, "mixed", with_groups(adamw, "{match=['qkv.weight', 'down.weight'], optimizer='muon'}"));
  CHECK(mixed.first != want.first);
  CHECK(trained(files, "set",
                with(with_groups(adamw, "{match=['qkv.weight'], optimizer='sgd'}"), {"optimizer.sgd.momentum=0.5"}))
            .first != want.first);
}

TEST_CASE("heads are refused where none of the matrices that Muon updates has any") {
  TinyFiles files;
  const Overrides split{"optimizer.muon.split=heads"};
  check_fails(quern_train(files, with({groups("{match=['down.weight'], optimizer='muon'}")}, split)), 2,
              {"--set optimizer.muon.split", "found \"heads\"", "expected \"tensors\""});
  CHECK(quern_train(files, with({groups("{match=['qkv.weight'], optimizer='muon'}"), files.run("qkv")}, split)).code ==
        0);
}

TEST_CASE("optimizers refuse what they do not know, by key") {
  TinyFiles files;
  check_fails(quern_train(files, {groups("{match=['*'], optimizer='adam'}")}), 2,
              {"train.groups.1.optimizer", "found \"adam\""});
  check_fails(quern_train(files, {"optimizer.id=muon", "optimizer.muon.moments=int8"}), 2, {"optimizer.muon.moments"});
  check_fails(quern_train(files, {"optimizer.id=muon", "optimizer.muon.split=head"}), 2,
              {"--set optimizer.muon.split", "found \"head\"", "\"head_groups\""});
  check_fails(quern_train(files, {"optimizer.adamw.moment2=fp16"}), 2, {"optimizer.adamw.moment2"});
  check_fails(quern_train(files, {"optimizer.adamw.block=192"}), 2, {"optimizer.adamw.block", "128 or 256"});
  check_fails(quern_train(files, {"optimizer.id=lion", "optimizer.lion.eps=1e-8"}), 2, {"optimizer.lion.eps"});
}
