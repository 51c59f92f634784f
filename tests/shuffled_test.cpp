// Runs whose streams take their work in a random order, each piece as late as the host allows, give the bits of any
// other: their schedules wait wherever they must.
#include <doctest/doctest.h>

#include "end_to_end.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;

namespace {

/// Weights after two steps of two micro-batches, with all state in host memory, so that transfers run on streams of
/// their own beside the kernels; moments in the store `moments`.
std::map<std::string, std::vector<float>> train_from_host(DType dtype, int ahead, const char* moments, Device& device) {
  PlanOptions options = stored_options(31, ahead);
  options.state.moments.memory = moments;
  TinyRun run({.layers = 3}, options, dtype, device);
  for (std::uint32_t number = 0; number < 4; ++number) {
    StepState state;
    state.step = state.updates = number / 2;
    state.micro_step = number % 2;
    state.learning_rate = 0.01f;
    run.engine().micro_step(random_batch(options.geometry, 37, number), state,
                            {.first = number % 2 == 0, .last = number % 2 == 1});
    if (number % 2) run.engine().update();
  }
  return run.all("master");
}

}  // namespace

TEST_CASE("no order that the schedules allow changes a bit of a run") {
  for (const char* precision : {"fp32", "e4m3"}) {
    CAPTURE(precision);
    TinyFiles files;
    const std::string export_file = "/export/model.safetensors";
    Overrides common{"precision.id=" + std::string(precision),
                     "train.accumulation=3",
                     "train.eval_every=3",
                     "sample.every=4",
                     "sample.prompts=\"1,2\"",
                     "sample.max_tokens=4",
                     "log.scales_every=2"};
    auto with = [&](Overrides more) {
      more.insert(more.end(), common.begin(), common.end());
      return more;
    };
    const SessionResult threads = train_here(files, with({files.run("threads")}));
    CHECK(threads.result.finished);
    for (const char* seed : {"1", "2", "3"}) {
      CAPTURE(seed);
      const std::string name = std::string("shuffled") + seed;
      const SessionResult shuffled = train_here(files, with({files.run(name), "device.cpu.streams=shuffled",
                                                             "device.cpu.shuffle_seed=" + std::string(seed)}));
      CHECK(shuffled.losses == threads.losses);
      CHECK((newest_tensors(files.at(name)) == newest_tensors(files.at("threads"))));
      CHECK((read_text(files.at(name) + export_file) == read_text(files.at("threads") + export_file)));
    }
  }
}

TEST_CASE("nor of one whose state comes from host memory and goes back") {
  for (DType dtype : {DType::f32, DType::bf16})
    for (const auto& [ahead, moments] : {std::pair(1, "host"), {2, "host"}, {1, "zerocopy"}}) {
      CAPTURE(ahead);
      CAPTURE(moments);
      const auto want = train_from_host(dtype, ahead, moments, *cpu_device());
      for (std::int64_t seed = 0; seed < 20; ++seed) {
        CAPTURE(seed);
        auto device = cpu_device({{"streams", std::string("shuffled")}, {"shuffle_seed", seed}});
        REQUIRE(train_from_host(dtype, ahead, moments, *device) == want);
      }
    }
}
