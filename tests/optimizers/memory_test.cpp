// What recipes take in memory, as docs/optimizers.md and docs/performance/memory.md state it: of plans of real models.
#include <filesystem>
#include <sstream>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;

namespace {

std::string plan_of(const std::string& config, const Overrides& overrides, const std::vector<std::string>& more = {}) {
  std::vector<std::string> words{"plan", QUERN_SOURCE_DIR "/configs/qwen2.5/" + config};
  for (const std::string& setting : overrides) words.insert(words.end(), {"--set", setting});
  words.insert(words.end(), more.begin(), more.end());
  const Outcome outcome = quern_run(words);
  INFO(outcome.err);
  REQUIRE(outcome.code == 0);
  return outcome.out;
}

/// The second number behind a word: embedding, blocks, head.
double of_blocks(const std::string& plan, const std::string& row) {
  REQUIRE(has(plan, row));
  std::istringstream line(plan.substr(plan.find(row) + row.size()));
  double embedding = 0, blocks = 0;
  line >> embedding >> blocks;
  return blocks;
}

}  // namespace

TEST_CASE("bytes a parameter of the layers are what the recipes' table says") {
  struct Row {
    Overrides settings;
    double bytes;
  };
  const Overrides low{"precision.id=low_bit"}, narrow{"optimizer.master=bf16", "optimizer.gradient=bf16"};
  for (const Row& row : {Row{{"optimizer.adamw.moments=fp32"}, 18.00}, Row{{"optimizer.adamw.moments=int8"}, 12.06},
                         Row{{"optimizer.id=muon"}, 14.00}, Row{{"optimizer.id=schedule_free"}, 22.00},
                         Row{with(narrow, {"optimizer.adamw.moments=int8"}), 6.06},
                         Row{with(low, {"optimizer.adamw.moments=int8"}), 11.07},
                         Row{with(low, {"optimizer.master=none", "optimizer.adamw.moments=int8"}), 7.07}}) {
    CAPTURE(row.settings);
    const Overrides plain{"device.id=cpu",         "train.micro_batch=1",     "train.sequence=64",
                          "optimizer.master=fp32", "optimizer.gradient=fp32", "precision.id=bf16"};
    CHECK(of_blocks(plan_of("0.5b.toml", with(plain, row.settings)), "bytes a parameter") == row.bytes);
  }
}

TEST_CASE("moments in 8 bits fit 7B in 16 GiB and 48 GB, and 14B in 24 GiB and 115 GB") {
  if (!std::filesystem::exists(QUERN_BUILD_DIR "/plugins/device/libquern_cuda.so")) {
    MESSAGE("skipped: built without the cuda device");
    return;
  }
  const Overrides common{"precision.id=e4m3",
                         "optimizer.adamw.moments=int8",
                         "memory.recompute=[\"block\"]",
                         "precision.e4m3.transposed_weights=made",
                         "memory.master=host",
                         "memory.moments=host",
                         "memory.gradients=host",
                         "memory.activations=device"};
  for (const char* gpu : {"H100", "RTX 4090"}) {
    CAPTURE(gpu);
    CHECK(has(plan_of("7b.toml",
                      with(common, {"train.micro_batch=4", "memory.device_budget=16GiB", "memory.host_budget=48GB"}),
                      {"--gpu", gpu}),
              "tok/s with the update"));
    CHECK(has(plan_of("14b.toml",
                      with(common, {"train.micro_batch=8", "memory.weights=host", "memory.device_budget=24GiB",
                                    "memory.host_budget=115GB"}),
                      {"--gpu", gpu}),
              "tok/s with the update"));
  }
}
