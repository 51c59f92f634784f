// Steps that are not finite: each policy, its limit, and that what follows has the bits it should have. A token whose
// embedding is NaN makes exactly those steps fail that see it.
#include <filesystem>
#include <limits>

#include <doctest/doctest.h>

#include "checkpoint/checkpoint.h"
#include "data/tokens/token_file.h"
#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;

namespace {

namespace fs = std::filesystem;

constexpr std::int32_t kPoison = 63;
constexpr std::int64_t kPoisonedWindow = 6;

/// Data in which one window of 13 has the poisoned token, and a checkpoint of step 1 where its embedding is NaN.
class PoisonedRun {
 public:
  explicit PoisonedRun(Overrides common) : common_(std::move(common)) {
    TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 64, .separator = -1};
    for (int i = 0; i < 13 * 16 + 1; ++i) content.tokens.push_back(i * 7 % 63);
    content.tokens[kPoisonedWindow * 16 + 5] = kPoison;
    write_token_file(files.at("train.tok"), content);
    common_.insert(common_.end(), {"data.tokens.validation=\"\"", "checkpoint.export=false", "checkpoint.keep_last=0",
                                   "train.micro_batch=1", "train.steps=13", "optimizer.learning_rate=1e-3"});
    train({files.run("clean")}, 1);
    Checkpoint good = read_checkpoint(checkpoint_path(files.at("clean"), 1));
    std::vector<std::vector<float>> memory;
    std::vector<NamedView> tensors;
    for (const StoredTensor& stored : good.tensors.tensors()) {
      memory.push_back(good.tensors.read_floats(stored.name));
      if (stored.name == "master/embedding.weight")
        memory.back()[kPoison * 32] = std::numeric_limits<float>::quiet_NaN();
      tensors.push_back({stored.name, {memory.back().data(), DType::f32, stored.extents}});
    }
    write_checkpoint(files.at("poisoned"), good.meta, tensors);
  }

  SessionResult train(Overrides more, std::int64_t stop_after = 0) const {
    more.insert(more.begin(), common_.begin(), common_.end());
    return train_here(files, more, stop_after);
  }
  Outcome quern(Overrides more) const {
    more.insert(more.begin(), common_.begin(), common_.end());
    return quern_train(files, more);
  }
  /// A run of that name at the poisoned checkpoint.
  std::string start(const std::string& name) const {
    fs::create_directories(files.at(name));
    fs::copy(files.at("poisoned") + "/checkpoints", files.at(name) + "/checkpoints", fs::copy_options::recursive);
    return files.run(name);
  }
  std::string tensors(const std::string& name, std::int64_t step) const {
    return read_text(checkpoint_path(files.at(name), step) + "/tensors.safetensors");
  }

  TinyFiles files;

 private:
  Overrides common_;
};

const Overrides kFp32{"precision.id=fp32"};
const Overrides kDelayed{"precision.id=e4m3"};  // scales of activations and gradients are delayed

}  // namespace

TEST_CASE("stop: the step that is not finite is named with its data, and the run ends") {
  PoisonedRun run(kFp32);
  Outcome outcome = run.quern({run.start("a")});
  CHECK(outcome.code == 5);
  auto found = events(run.files.at("a"), "non_finite");
  REQUIRE(found.size() == 1);
  CHECK(found[0].at("action") == "stop");
  CHECK(found[0].at("loss").is_null());
  CHECK(found[0].at("data") == run.files.at("train.tok") + " window " + std::to_string(kPoisonedWindow));
  CHECK(outcome.err.find("step " + std::to_string(found[0].at("step").get<int>()) + ":") != std::string::npos);
}

TEST_CASE("skip: the step's data are passed over, no bit of the state moves, and the run goes on") {
  for (const Overrides& numbers : {kFp32, kDelayed}) {
    CAPTURE(numbers[0]);
    PoisonedRun run(numbers);
    SessionResult whole = run.train({run.start("a"), "checkpoint.every=1", "guard.non_finite=skip"});
    CHECK(whole.result.finished);
    auto found = events(run.files.at("a"), "non_finite");
    REQUIRE(found.size() == 1);
    const std::int64_t failed = found[0].at("step");
    REQUIRE(failed > 2);
    CHECK(found[0].at("action") == "skip");
    CHECK(whole.losses.size() == 11);  // steps 2 to 13 but for that one
    CHECK_FALSE(whole.losses.contains(failed));
    for (std::int64_t step = 2; step <= 13; ++step) {
      CAPTURE(step);
      CHECK((run.tensors("a", step) == run.tensors("a", step - 1)) == (step == failed));
    }
    // Stopped and continued there, before it and after it.
    for (std::int64_t stop : {failed - 1, failed + 1}) {
      std::string name = "stopped" + std::to_string(stop);
      Overrides more{run.start(name), "checkpoint.every=0", "guard.non_finite=skip"};
      CHECK(run.train(more, stop).result.step == stop);
      CHECK(run.train(more).result.finished);
      CHECK(newest_tensors(run.files.at(name)) == newest_tensors(run.files.at("a")));
    }
  }
}

TEST_CASE("roll_back: from the newest checkpoint on, with the data after the step that failed") {
  for (const Overrides& numbers : {kFp32, kDelayed}) {
    CAPTURE(numbers[0]);
    PoisonedRun run(numbers);
    // So few steps that the windows of one pass are enough, since three at most are passed over.
    Overrides policy{"guard.non_finite=roll_back", "checkpoint.every=3", "train.steps=10"};
    auto with = [&](const std::string& place) {
      Overrides all = policy;
      all.push_back(place);
      return all;
    };
    SessionResult whole = run.train(with(run.start("a")));
    CHECK(whole.result.finished);
    CHECK(whole.result.step == 10);
    auto found = events(run.files.at("a"), "non_finite");
    REQUIRE(found.size() == 1);
    const std::int64_t failed = found[0].at("step"), back = std::max<std::int64_t>((failed - 1) / 3 * 3, 1);
    CHECK(found[0].at("action") == "roll_back");
    std::vector<std::int64_t> steps, want;
    for (const auto& step : events(run.files.at("a"), "step")) steps.push_back(step.at("step"));
    for (std::int64_t step = 2; step < failed; ++step) want.push_back(step);
    for (std::int64_t step = back + 1; step <= 10; ++step) want.push_back(step);
    CHECK(steps == want);
    // Stopped once it went past the step that failed, and continued.
    REQUIRE(failed < 10);
    CHECK(run.train(with(run.start("stopped")), failed).result.step == failed);
    CHECK(run.train(with(run.files.run("stopped"))).result.finished);
    CHECK(newest_tensors(run.files.at("stopped")) == newest_tensors(run.files.at("a")));
    // Killed between the roll back and the next checkpoint, it comes to that step again and does the same.
    const std::string last = newest_tensors(run.files.at("a"));
    for (std::int64_t step = back + 1; step <= 10; ++step) fs::remove_all(checkpoint_path(run.files.at("a"), step));
    CHECK(run.train(with(run.files.run("a"))).result.finished);
    CHECK(events(run.files.at("a"), "non_finite").size() == 2);
    CHECK(newest_tensors(run.files.at("a")) == last);
  }
}

TEST_CASE("numbers that explode whatever the data reach the limit and end the run") {
  for (const char* policy : {"skip", "roll_back"}) {
    CAPTURE(policy);
    TinyFiles files;
    const std::string run = files.at("run");
    Outcome outcome = quern_train(files, {"optimizer.learning_rate=1e30", "train.steps=50", "checkpoint.every=0",
                                          std::string("guard.non_finite=") + policy, "guard.limit=3"});
    CAPTURE(outcome.err);
    CHECK(outcome.code == 5);
    CHECK(outcome.err.find("after guard.limit = 3 such steps") != std::string::npos);
    auto found = events(run, "non_finite");
    REQUIRE(found.size() == 4);
    for (std::size_t i = 0; i < 4; ++i) CHECK(found[i].at("action") == (i < 3 ? policy : "stop"));
    CHECK(newest_step(run) == (std::string(policy) == "skip" ? -1 : 0));
  }
}

TEST_CASE("a checkpoint from which no step goes well is passed over for an older one, and samples do not end the run") {
  TinyFiles files;
  const std::string run = files.at("run");
  // The first update ruins the weights, and is saved.
  Outcome outcome = quern_train(files, {"optimizer.learning_rate=1e20", "optimizer.clip_norm=0.0", "checkpoint.every=1",
                                        "guard.non_finite=roll_back", "guard.limit=2", "sample.every=1",
                                        "sample.prompts=[\"1,2\"]", "sample.max_tokens=4"});
  CAPTURE(outcome.err);
  CHECK(outcome.code == 5);
  CHECK(outcome.err.find("after guard.limit = 2 such steps") != std::string::npos);
  std::string warnings;
  for (const auto& warning : events(run, "warning")) warnings += warning.at("text").get<std::string>() + "\n";
  CAPTURE(warnings);
  CHECK(warnings.find("no samples of step 1: ") < warnings.find("rolled back to step 1, "));
  CHECK(warnings.find("rolled back to step 1, ") < warnings.find("rolled back to step 0, "));
  CHECK(warnings.find("rolled back to step 0, ") != std::string::npos);
  CHECK_FALSE(events(run, "checkpoint").empty());  // those written behind the steps that failed, too
}

TEST_CASE("spikes of loss and norm are logged with their data") {
  TinyFiles files;
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 64, .separator = -1};
  for (int i = 0; i < 40 * 16 + 1; ++i) content.tokens.push_back(i / 16 == 25 ? (i * i * 7 + 11) % 64 : i % 4);
  write_token_file(files.at("odd.tok"), content);
  Overrides common{"data.tokens.train=" + files.at("odd.tok"),
                   "data.tokens.validation=\"\"",
                   "train.steps=40",
                   "train.micro_batch=1",
                   "guard.window=5",
                   "checkpoint.export=false"};
  CHECK(quern_train(files, common).code == 0);
  auto spikes = events(files.at("run"), "spike");
  REQUIRE_FALSE(spikes.empty());
  auto odd = std::find_if(spikes.begin(), spikes.end(), [&](const nlohmann::json& spike) {
    return spike.at("data") == files.at("odd.tok") + " window 25" && spike.at("what") == "loss";
  });
  REQUIRE(odd != spikes.end());
  CHECK(odd->at("z").get<double>() > 6);
  CHECK(odd->at("value").get<double>() > odd->at("mean").get<double>() + 6 * odd->at("deviation").get<double>());
  common.insert(common.end(), {"guard.spike_z=0.0", files.run("none")});
  CHECK(quern_train(files, common).code == 0);
  CHECK(events(files.at("none"), "spike").empty());
  CHECK(newest_tensors(files.at("none")) == newest_tensors(files.at("run")));
}
