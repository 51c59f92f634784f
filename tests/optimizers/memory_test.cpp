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
    double wide, narrow;  ///< masters and gradients in fp32, in bf16; 0: refused
  };
  const Overrides low{"precision.id=low_bit", "optimizer.adamw.moments=int8"};
  const Overrides e4m3{"precision.id=e4m3", "optimizer.adamw.moments=int8"};
  const Overrides none = with(low, {"optimizer.master=none"});
  for (const Row& row :
       {Row{{"optimizer.adamw.moments=fp32"}, 18.00, 12.00}, Row{{"optimizer.adamw.moments=bf16"}, 14.00, 8.00},
        Row{{"optimizer.adamw.moments=int8", "optimizer.adamw.block=128"}, 12.06, 6.06},
        Row{{"optimizer.adamw.moments=e4m3", "optimizer.adamw.block=256"}, 12.04, 6.04},
        Row{{"optimizer.id=lion"}, 14.00, 8.00}, Row{{"optimizer.id=sgd", "optimizer.sgd.moments=bf16"}, 12.00, 6.00},
        Row{{"optimizer.id=muon"}, 14.00, 8.00}, Row{{"optimizer.id=muon", "optimizer.muon.moments=bf16"}, 12.00, 6.00},
        Row{{"optimizer.id=schedule_free"}, 22.00, 0},
        Row{with(e4m3, {"precision.e4m3.transposed_weights=made"}), 11.06, 7.06},
        Row{with(e4m3, {"precision.e4m3.transposed_weights=kept"}), 12.06, 8.06}, Row{low, 11.07, 7.07},
        Row{with({"optimizer.adamw.moments=int8"}, {"precision.id=int8"}), 12.07, 8.07},
        Row{with({"optimizer.adamw.moments=int8"}, {"precision.id=int4"}), 12.07, 8.07}, Row{none, 7.07, 5.07},
        Row{with(none, {"precision.low_bit.activations=int8_stochastic", "precision.low_bit.gradients=int8"}), 7.07,
            5.07},
        Row{with(low, {"precision.low_bit.weights=int4"}), 10.69, 6.69},
        Row{with(low, {"precision.low_bit.weights=ternary", "precision.low_bit.activations=int8"}), 10.32, 6.32}})
    for (const std::string format : {"fp32", "bf16"}) {
      const double bytes = format == "fp32" ? row.wide : row.narrow;
      if (bytes == 0) continue;
      CAPTURE(row.settings);
      CAPTURE(format);
      const Overrides plain{"device.id=cpu",     "train.micro_batch=1",        "train.sequence=64",
                            "precision.id=bf16", "optimizer.master=" + format, "optimizer.gradient=" + format};
      CHECK(of_blocks(plan_of("0.5b.toml", with(plain, row.settings)), "bytes a parameter") == bytes);
    }
}

TEST_CASE("ranks gather low-bit weights packed") {
  struct Format {
    const char* weights;
    int bits;
  };
  for (const Format& format : {Format{"int4", 4}, Format{"ternary", 2}}) {
    const Overrides ranks{"device.id=cpu",
                          "train.micro_batch=1",
                          "train.sequence=64",
                          "precision.id=low_bit",
                          std::string("precision.low_bit.weights=") + format.weights,
                          "parallel.ranks=2",
                          "parallel.communicator=memcpy",
                          "parallel.shard_optimizer=ranks",
                          "parallel.shard_weights=ranks"};
    const std::string schedule = plan_of("0.5b.toml", ranks, {"--show", "schedule"});
    const std::string gather = "all_gather o.weight.quantize_weights o.weight, layer 0";
    REQUIRE(has(schedule, gather));
    // What a rank moves: its half is read, and all of it written.
    CHECK(std::stod(schedule.substr(schedule.find(gather) + gather.size())) ==
          896 * 896 / 8 * format.bits / 1024 * 3 / 2);
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
