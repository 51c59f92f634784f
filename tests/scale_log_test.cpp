// Figures of delayed scales in the log of a whole run: they are the step's own, and reading them changes nothing.
#include <cmath>
#include <cstring>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "quern/step_state.h"

using namespace quern;
using namespace quern::testing;

namespace {

Overrides with(Overrides base, const Overrides& more) {
  base.insert(base.end(), more.begin(), more.end());
  return base;
}

const Overrides kRun{"precision.id=e4m3",        "precision.e4m3.observe=true", "train.steps=6",
                     "precision.e4m3.history=6", "train.accumulation=2",        "checkpoint.export=false",
                     "checkpoint.every=0",       "train.eval_every=1"};

std::string state_of(const nlohmann::json& event) {
  std::string name = event.at("tensor").get<std::string>() + ".state";
  return event.contains("layer") ? name + "/" + std::to_string(event["layer"].get<int>()) : name;
}

}  // namespace

TEST_CASE("each delayed scale is logged with the amax that its history keeps") {
  TinyFiles files;
  Losses plain = train_here(files, with(kRun, {files.run("plain")})).losses;
  CHECK(events(files.at("plain"), "scale").empty());
  CHECK(train_here(files, with(kRun, {files.run("logged"), "log.scales_every=1"})).losses == plain);
  CHECK(newest_tensors(files.at("logged")) == newest_tensors(files.at("plain")));

  NewestCheckpoint newest = find_newest(files.at("logged"));
  REQUIRE(newest.checkpoint);
  std::size_t states = 0;
  for (const StoredTensor& tensor : newest.checkpoint->tensors.tensors())
    states += tensor.name.find(".state") != std::string::npos;
  REQUIRE(states > 10);
  std::vector<nlohmann::json> scales = events(files.at("logged"), "scale");
  CHECK(scales.size() == 6 * states);
  bool redone = false, lost = false;
  for (const nlohmann::json& event : scales) {
    CAPTURE(event.dump());
    const StoredTensor& stored = newest.checkpoint->tensors.at(state_of(event));
    std::vector<float> words(stored.bytes / 4);
    std::memcpy(words.data(), newest.checkpoint->tensors.bytes(stored).data(), stored.bytes);
    // The history is newest first, and the checkpoint is of step 6.
    std::size_t age = static_cast<std::size_t>(6 - event.at("step").get<int>());
    const double amax = event.at("amax"), scale = event.at("scale");
    CHECK(amax == double{words[kScaleStateWords + age]});
    CHECK(amax > 0);
    CHECK(amax <= scale * 448);
    CHECK(std::exp2(std::round(std::log2(scale))) == scale);
    for (const char* fraction : {"clipped", "underflowed"}) {
      CHECK(event.at(fraction).get<double>() >= 0);
      CHECK(event.at(fraction).get<double>() < 0.5);
    }
    // Nothing is known before the first launch, so it is done again; what it would have clipped is not counted then.
    if (event.at("step") == 1) CHECK(event.at("redone").get<int>() >= 1);
    redone = redone || (event.at("step") > 1 && event.at("redone").get<int>() > 0);
    lost = lost || event.at("underflowed").get<double>() > 0;
    if (event.at("clipped").get<double>() > 0) CHECK(event.at("redone").get<int>() > 0);
  }
  CHECK(redone);
  CHECK(lost);
}

TEST_CASE("scales are logged on every n-th step, fractions only when counted, and a warning where there are none") {
  TinyFiles files;
  train_here(files, with(kRun, {files.run("some"), "log.scales_every=3", "precision.e4m3.observe=false"}));
  std::vector<nlohmann::json> scales = events(files.at("some"), "scale");
  REQUIRE(!scales.empty());
  for (const nlohmann::json& event : scales) {
    CHECK(event.at("step").get<int>() % 3 == 0);
    CHECK(!event.contains("clipped"));
    CHECK(!event.contains("underflowed"));
  }
  train_here(files, with(kRun, {files.run("none"), "log.scales_every=3", "precision.id=bf16"}));
  CHECK(events(files.at("none"), "scale").empty());
  std::vector<nlohmann::json> warnings = events(files.at("none"), "warning");
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].at("text").get<std::string>().find("log.scales_every") != std::string::npos);
}
