// An optimizer that needs whole matrices (tests/conformance/broken/optimizer/ratio.cpp) learns the same wherever its
// state is, and on any number of ranks: rows are cut only where the update op allows it.
#include <cstdlib>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "plan/test_plans.h"
#include "ranks/rank_group.h"
#include "test_paths.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;

namespace {

constexpr const char* kFolder = QUERN_BUILD_DIR "/tests/conformance";

Outcome train_ratio(const TinyFiles& files, const Overrides& overrides) {
  ::setenv("QUERN_PLUGIN_PATH", kFolder, 1);
  const Outcome outcome = quern_train(files, with({"optimizer.id=ratio", "train.accumulation=4"}, overrides));
  ::unsetenv("QUERN_PLUGIN_PATH");
  return outcome;
}

}  // namespace

TEST_CASE("windows of the update keep matrices whole where the optimizer needs them") {
  PluginHost host({kFolder, QUERN_BUILD_DIR "/plugins"});
  const testkit::TinyModel model;
  auto train = [&](const char* locality, PlanOptions options) {
    OptionValues stated = default_values(host.require("optimizer", "ratio").options);
    stated.set("locality", std::string(locality));
    const auto optimizer = host.create<Optimizer>("ratio", stated);
    const auto device = host.create<Device>("cpu", default_values(host.require("device", "cpu").options));
    for (const CustomKernel& kernel : host.kernels()) device->add_kernel(kernel);
    device->open(0);
    conformance::Trial trial(host, {model, *device, nullptr, optimizer.get()}, std::move(options));
    const double loss = trial.train(0, 4);
    return std::pair(loss, trial.all("master"));
  };
  PlanOptions windows = stored_options(7, 1);
  windows.update_window_bytes = 2048;  // less than a matrix
  const auto want = train("matrix", stored_options(0, 1));
  CHECK(train("matrix", windows) == want);
  CHECK(train("row", windows) != want);  // the rows' norms
}

TEST_CASE("ranks keep matrices whole where the optimizer needs them, and shard the others") {
  TinyFiles files;
  const Overrides mixed = {"optimizer.ratio.blocks_only=true"};
  std::vector<Losses> losses;
  for (const char* sharding : {"none", "ranks"}) {
    const Overrides numbers = with(mixed, of_ranks(4, sharding));
    const Outcome outcome = train_ratio(files, with(numbers, {files.run(sharding)}));
    INFO(outcome.err);
    REQUIRE(outcome.code == 0);
    losses.push_back(logged_losses(files.at(sharding)));
  }
  CHECK(losses[0].size() == 8);
  CHECK(losses[1] == losses[0]);
  CHECK(newest_tensors(files.at("ranks")) == newest_tensors(files.at("none")));
  CHECK(has(read_text(files.at("ranks") + "/log.jsonl"), "of which op ratio_update_matrix needs whole matrices"));
}

TEST_CASE("ranks do not shard an optimizer that needs every matrix whole") {
  TinyFiles files;
  check_fails(
      train_ratio(files, of_ranks(4, "ranks")), 2,
      {"parallel.shard_optimizer", "of which op ratio_update_matrix needs whole matrices", "set it to \"none\""});
  CHECK(train_ratio(files, with(of_ranks(4, "none"), {files.run("whole")})).code == 0);
}
