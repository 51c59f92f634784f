// Figures of quantized tensors in the log of a whole run: they are the step's own, and observing changes nothing.
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "quern/step_state.h"

using namespace quern;
using namespace quern::testing;

namespace {

const Overrides kRun{"precision.id=e4m3",    "train.steps=6",           "precision.e4m3.history=6",
                     "train.accumulation=2", "checkpoint.export=false", "checkpoint.every=0",
                     "train.eval_every=1"};

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
  std::size_t delayed = 0;
  bool redone = false, lost = false;
  for (const nlohmann::json& event : events(files.at("logged"), "scale")) {
    CAPTURE(event.dump());
    const double amax = event.at("amax"), scale = event.at("scale");
    CHECK(amax > 0);
    CHECK(amax <= scale * (event.at("format") == "e5m2" ? 57344 : 448));
    CHECK(std::exp2(std::round(std::log2(scale))) == scale);
    for (const char* fraction : {"clipped", "underflowed"}) {
      CHECK(event.at(fraction).get<double>() >= 0);
      CHECK(event.at(fraction).get<double>() < 0.5);
    }
    if (event.at("clipped").get<double>() > 0) CHECK(event.at("redone").get<int>() > 0);
    if (!event.contains("redone")) continue;
    ++delayed;
    const StoredTensor& stored = newest.checkpoint->tensors.at(state_of(event));
    std::vector<float> words(stored.bytes / 4);
    std::memcpy(words.data(), newest.checkpoint->tensors.bytes(stored).data(), stored.bytes);
    // The history is newest first, and the checkpoint is of step 6.
    std::size_t age = static_cast<std::size_t>(6 - event.at("step").get<int>());
    CHECK(amax == double{words[kScaleStateWords + age]});
    // Nothing is known before the first launch, so it is repeated; values it would have clipped are not counted then.
    if (event.at("step") == 1) CHECK(event.at("redone").get<int>() >= 1);
    redone = redone || (event.at("step") > 1 && event.at("redone").get<int>() > 0);
    lost = lost || event.at("underflowed").get<double>() > 0;
  }
  CHECK(delayed == 6 * states);
  CHECK(redone);
  CHECK(lost);
}

TEST_CASE("every kind of scale is logged, of activations, gradients, weights and logits, and changes no bit") {
  TinyFiles files;
  for (const std::string mode : {"current", "row", "block", "square"}) {
    CAPTURE(mode);
    const Overrides run = with(kRun, {"precision.e4m3.activation_scaling=" + mode,
                                      "precision.e4m3.gradient_scaling=" + mode, "memory.recompute=['ffn']"});
    const Losses plain = train_here(files, with(run, {files.run(mode + ".plain")})).losses;
    CHECK(train_here(files, with(run, {files.run(mode), "log.scales_every=2"})).losses == plain);
    CHECK(newest_tensors(files.at(mode)) == newest_tensors(files.at(mode + ".plain")));
    std::set<std::string> seen;
    bool several = false;
    for (const nlohmann::json& event : events(files.at(mode), "scale")) {
      CAPTURE(event.dump());
      CHECK(event.at("step").get<int>() % 2 == 0);
      CHECK(event.at("amax") > 0);
      CHECK(event.at("clipped") == 0);
      CHECK(event.at("underflowed") < 0.5);
      CHECK(!event.contains("redone"));
      several = several || event.contains("smallest_scale");
      if (event.value("layer", 0) == 0) seen.insert(event.at("tensor").get<std::string>());
    }
    if (mode != "current") CHECK(several);
    const std::string weight = mode == "current" ? "quantize" : mode == "row" ? "quantize_rows" : "quantize_blocks";
    for (const std::string& tensor :
         {std::string("attn_norm.e4m3"), std::string("d.gate_up.e4m3"), "qkv.weight." + weight,
          std::string("head.final_norm.e4m3"), std::string("head.d.logits.e5m2")})
      CHECK_MESSAGE(seen.contains(tensor), tensor);
    const std::string by_tokens = mode == "row" ? ".channels" : ".t";
    CHECK(seen.contains("swiglu.e4m3" + by_tokens) == (mode == "row" || mode == "block"));
  }
}

// Ranks have the micro-batches of one rank, and each scale is of one micro-batch.
TEST_CASE("several ranks log the figures that one has of the same step") {
  TinyFiles files;
  for (const std::string mode : {"current", "row"}) {
    CAPTURE(mode);
    auto logged = [&](const std::string& name, const Overrides& more) {
      const Overrides run{files.run(mode + name),
                          "log.scales_every=1",
                          "train.steps=1",
                          "train.accumulation=3",
                          "optimizer.gradient=fp32",
                          "precision.e4m3.activation_scaling=" + mode,
                          "precision.e4m3.gradient_scaling=" + mode};
      const Outcome outcome = quern_train(files, with(with(kRun, run), more));
      CAPTURE(outcome.err);
      CHECK(outcome.code == 0);
      std::map<std::string, nlohmann::json> seen;
      for (const nlohmann::json& event : events(files.at(mode + name), "scale"))
        seen[event.at("tensor").get<std::string>() + std::to_string(event.value("layer", -1))] = event;
      return seen;
    };
    const auto one = logged("one", {});
    CHECK(one.size() > 10);
    for (const char* sharding : {"none", "ranks"})
      CHECK(logged(sharding, {"parallel.ranks=3", "parallel.communicator=memcpy",
                              "parallel.shard_optimizer=" + std::string(sharding)}) == one);
  }
}

TEST_CASE("tensors keep their names where modes differ and where quantized values of one form are read") {
  TinyFiles files;
  auto names = [&](const std::string& name, const Overrides& more) {
    train_here(files, with(with(kRun, {files.run(name), "log.scales_every=6"}), more));
    std::set<std::string> seen;
    for (const nlohmann::json& event : events(files.at(name), "scale"))
      seen.insert(event.at("tensor").get<std::string>());
    return seen;
  };
  std::set<std::string> seen = names("mixed", {"precision.e4m3.gradient_scaling=row"});
  CHECK(seen.contains("d.qkv.e4m3"));
  CHECK(seen.contains("d.qkv.e4m3.2"));
  seen = names("one", {"precision.e4m3.products=['input_gradient']", "precision.e4m3.head=bf16"});
  CHECK(seen.contains("qkv.weight.quantize"));
  CHECK(!seen.contains("swiglu.e4m3"));
  CHECK(!seen.contains("head.d.logits.e5m2"));
}

TEST_CASE("a step that is not finite is logged with the share of such values") {
  TinyFiles files;
  train_here(files, with(kRun, {files.run("burst"), "log.scales_every=1", "guard.non_finite=skip", "guard.limit=100",
                                "optimizer.learning_rate=1e10"}));
  bool found = false;
  for (const nlohmann::json& event : events(files.at("burst"), "scale"))
    found = found || (event.contains("non_finite") && event["non_finite"].get<double>() > 0);
  CHECK(found);
}

TEST_CASE("scales are logged on every n-th step, and a warning where there are none") {
  TinyFiles files;
  train_here(files, with(kRun, {files.run("some"), "log.scales_every=3"}));
  std::set<int> steps;
  for (const nlohmann::json& event : events(files.at("some"), "scale")) steps.insert(event.at("step").get<int>());
  CHECK(steps == std::set<int>{3, 6});
  train_here(files, with(kRun, {files.run("none"), "log.scales_every=3", "precision.id=bf16"}));
  CHECK(events(files.at("none"), "scale").empty());
  std::vector<nlohmann::json> warnings = events(files.at("none"), "warning");
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].at("text").get<std::string>().find("log.scales_every") != std::string::npos);
}
