// `quern ab` as a user meets it, on the tiny run: what it leaves, how it fails, how it is interrupted and goes on.
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>

#include <doctest/doctest.h>

#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;
namespace fs = std::filesystem;

namespace {

std::vector<std::string> ab(const TinyFiles& files, const std::vector<std::string>& words) {
  std::vector<std::string> all{"ab", files.config(), "--out", files.at("ab")};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

nlohmann::json report_of(const TinyFiles& files) {
  return nlohmann::json::parse(read_text(files.at("ab") + "/report.json"));
}

}  // namespace

TEST_CASE("arms are trained in turn with shared seeds, and compared") {
  TinyFiles files;
  Outcome outcome = quern_run(ab(files, {"--vary", "precision.id=fp32,bf16", "--repeat", "2", "--steps", "5"}));
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(outcome.err == "");
  std::size_t at = 0;
  for (const char* line : {"1/4  precision.id=fp32  seed 1", "2/4  precision.id=bf16  seed 1",
                           "3/4  precision.id=fp32  seed 2", "4/4  precision.id=bf16  seed 2", "| arm", "plots:"}) {
    CAPTURE(line);
    std::size_t found = outcome.out.find(line, at);
    REQUIRE(found != std::string::npos);
    at = found;
  }
  CHECK(has(outcome.out, read_text(files.at("ab") + "/report.md")));

  nlohmann::json report = report_of(files);
  REQUIRE(report["arms"].size() == 2);
  for (const auto& arm : report["arms"]) {
    CHECK(arm["good_runs"] == 2);
    CHECK(arm["tokens_per_second"] > 0);
    CHECK(arm["device_bytes"] > 1000);
    CHECK(arm["peak_host_bytes"] > 1000000);
    CHECK(arm["training_loss"]["deviation"] > 0);
    CHECK(arm["validation_loss"]["mean"] > 0);
  }
  const auto& bf16 = report["arms"][1];
  CHECK(bf16["runs"][0]["first_difference"] == 1);
  double difference = bf16["training_loss"]["difference"];
  CHECK(difference != 0);
  CHECK(std::abs(difference) < 0.05);  // 8 bits of a loss of about 4
  // The arm's run is what `quern train` makes of that seed and precision.
  Losses alone = train_here(files, {"precision.id=bf16", "train.seed=2", "train.steps=5"}).losses;
  CHECK(logged_losses(bf16["runs"][1]["directory"]) == alone);
  CHECK_FALSE(fs::exists(bf16["runs"][1]["directory"].get<std::string>() + "/checkpoints/step-00000005"));
}

TEST_CASE("arms with the same numbers never differ, and further repeats add to what is there") {
  TinyFiles files;
  std::vector<std::string> words{"--vary", "device.cpu.threads=1,2", "--steps", "3"};
  REQUIRE(quern_run(ab(files, words)).code == 0);
  CHECK(report_of(files)["arms"][1]["runs"][0]["first_difference"] == 0);
  CHECK(has(read_text(files.at("ab") + "/report.md"), "One repeat"));
  words.insert(words.end(), {"--repeat", "2"});
  Outcome more = quern_run(ab(files, words));
  CHECK(more.code == 0);
  CHECK(has(more.out, "2 runs were there already"));
  CHECK_FALSE(has(more.out, "1/4"));
  CHECK(has(more.out, "4/4"));
  CHECK(report_of(files)["arms"][1]["good_runs"] == 2);
  words[3] = "4";  // steps
  Outcome other = quern_run(ab(files, words));
  CHECK(other.code == 2);
  CHECK(has(other.err, "a comparison of other arms"));
}

TEST_CASE("the table has the share of a step that several ranks wait for each other") {
  TinyFiles files;
  Outcome outcome = quern_run(ab(files, {"--set", "parallel.communicator=memcpy", "--set", "train.accumulation=2",
                                         "--steps", "3", "--repeat", "2", "--vary", "parallel.ranks=1,2"}));
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(has(outcome.out, "4/4  parallel.ranks=2  seed 2"));
  CHECK(has(outcome.out, "waiting for ranks |"));
  nlohmann::json report = report_of(files);
  CHECK(report["arms"][0]["waiting"].is_null());
  CHECK(report["arms"][1]["waiting"].is_number());
  CHECK(report["arms"][1]["runs"].size() == 2);
}

TEST_CASE("an arm that fails is reported with its code and message, and the others go on") {
  TinyFiles files;
  Outcome outcome = quern_run(
      ab(files, {"--vary", "optimizer.learning_rate=1e-2,1e30", "--arm", "train.from=/nowhere", "--repeat", "2"}));
  CHECK(outcome.code == 5);
  CHECK(has(outcome.out, "FAILED: `optimizer.learning_rate=1e30`, seed 2, after step "));
  CHECK(has(outcome.out, "with exit code 5: step "));
  CHECK(has(outcome.out, "FAILED: `train.from=/nowhere`, seed 1, after step 0, with exit code 3: /nowhere"));
  nlohmann::json report = report_of(files);
  CHECK(report["arms"][0]["good_runs"] == 2);
  CHECK(report["arms"][1]["good_runs"] == 0);
  CHECK(report["arms"][1]["runs"][0]["exit_code"] == 5);
  CHECK(report["arms"][2]["runs"][1]["exit_code"] == 3);
}

TEST_CASE("faults of the words are found before anything runs") {
  TinyFiles files;
  auto refused = [&](const std::vector<std::string>& words, int code, const char* part) {
    Outcome outcome = quern_run(ab(files, words));
    CAPTURE(outcome.err);
    CHECK(outcome.code == code);
    CHECK(has(outcome.err, part));
    CHECK_FALSE(fs::exists(files.at("ab") + "/report.md"));
  };
  refused({"--vary", "train.stepz=1,2"}, 2, "nearest name `steps`");
  refused({"--vary", "precision.id=fp32,fp33"}, 2, "fp33");
  refused({"--vary", "precision.id=fp32"}, 2, "1 arm");
  refused({}, 2, "--vary");
  refused({"--vary", "train.seed=1,2", "--repeat", "0"}, 2, "--repeat");
  refused({"--vary", "train.seed=1,2", "--out", ""}, 2, "--out: empty");
  fs::create_directory(files.at("ab"));
  write_text(files.at("ab") + "/thesis.txt", "mine");
  refused({"--vary", "train.seed=1,2"}, 2, "not empty");
  CHECK(read_text(files.at("ab") + "/thesis.txt") == "mine");
  CHECK(quern_run({"ab", files.at("none.toml"), "--vary", "train.seed=1,2"}).code == 3);
}

TEST_CASE("Ctrl-C ends the run in progress, leaves with 130, and the same command goes on") {
  TinyFiles files;
  std::vector<std::string> command = ab(files, {"--vary", "train.steps=2,1000000"});
  Child child(command);
  const std::string second = files.at("ab") + "/2-train.steps=1000000/seed-1";
  while (child.running() && !has(read_text(second + "/log.jsonl"), "\"step\"")) ::usleep(1000);
  REQUIRE(child.running());
  child.signal(SIGINT);
  CHECK(child.wait() == 130);
  CHECK(has(child.out(), "the same command continues"));
  CHECK_FALSE(fs::exists(second + "/run.json"));
  // Nobody holds the run's directory any more, and the finished arm is kept.
  CHECK(quern_train(files, {"log.directory=" + second, "train.steps=1"}).code == 0);
  Child again(command);
  while (again.running() && !has(read_text(second + "/log.jsonl"), "\"step\":3,")) ::usleep(1000);
  CHECK(again.running());
  again.signal(SIGTERM);
  CHECK(again.wait() == 143);
  CHECK_FALSE(has(again.out(), "1/2"));
}
