#include "ab/comparison.h"

#include <cmath>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using namespace quern;
using namespace quern::ab;

namespace {

// `loss` falls by 0.1 a step from `loss` + 1; speed is 1 in the first step, then `speed`.
Run run_of(std::int64_t seed, double loss, double speed) {
  Run run;
  run.seed = seed;
  run.directory = "d";
  run.peak_host_bytes = 2000;
  run.log.tokens_per_step = 32;
  run.log.device_bytes = 1024;
  for (int step = 1; step <= 10; ++step)
    run.log.steps.push_back({step, loss + 0.1 * (10 - step), 2 * loss, step == 1 ? 1 : speed});
  run.log.validation_loss = loss + 1;
  return run;
}

ArmRuns arm_of(const std::string& name, std::vector<Run> runs) {
  return {{.name = name, .folder = name, .overrides = {name}}, std::move(runs)};
}

const ArmRuns kBase = arm_of("a=1", {run_of(1, 4.0, 100), run_of(2, 4.25, 110), run_of(3, 4.5, 105)});
const ComparisonHead kHead{"base.toml", "0.1.0", 3};

}  // namespace

TEST_CASE("differences are between runs of one seed, beside the spread over seeds") {
  auto figures = compare({kBase, arm_of("a=2", {run_of(1, 4.5, 200), run_of(2, 4.75, 220), run_of(3, 5.0, 210)})});
  REQUIRE(figures.size() == 2);
  CHECK(figures[0].loss.mean == 4.25);
  CHECK(figures[0].loss.deviation == 0.25);
  CHECK(figures[0].loss.difference == 0);
  CHECK(figures[0].tokens_per_second == 105);
  CHECK(figures[0].speed_interval.low == 100);
  CHECK(figures[0].speed_interval.high == 110);
  CHECK(figures[1].loss.difference == 0.5);
  CHECK(figures[1].loss.difference_deviation == 0);
  CHECK(figures[1].validation_loss.mean == 5.75);
  CHECK(figures[1].gradient_norm.difference == 1);
  CHECK(figures[1].speed_ratio == 2);
  CHECK(figures[1].speed_ratio_range.high == 2);
  CHECK(figures[1].device_bytes == 1024);
  CHECK(figures[1].first_differences == std::vector<std::optional<std::int64_t>>{1, 1, 1});
  CHECK(figures[0].first_differences == std::vector<std::optional<std::int64_t>>{0, 0, 0});
}

TEST_CASE("failed runs are left out of the figures, reported, and leave the other pairs whole") {
  Run failed = run_of(2, 9, 1);
  failed.code = 5;
  failed.message = "step 3: not | finite";
  failed.log.steps.resize(2);
  std::vector<ArmRuns> arms{kBase, arm_of("a=2", {run_of(1, 4.5, 200), failed, run_of(3, 5.0, 210)})};
  auto figures = compare(arms);
  CHECK(figures[1].good_runs == 2);
  CHECK(figures[1].loss.mean == 4.75);
  CHECK(figures[1].loss.difference == 0.5);
  CHECK_FALSE(figures[1].first_differences[1]);
  std::string text = comparison_markdown(kHead, arms);
  CHECK(text.find("FAILED: `a=2`, seed 2, after step 2, with exit code 5: step 3: not | finite") != std::string::npos);
  auto json = nlohmann::json::parse(comparison_json(kHead, arms));
  CHECK(json["arms"][1]["runs"][1]["exit_code"] == 5);
  CHECK(json["arms"][1]["runs"][1]["first_difference"].is_null());
  CHECK(json["arms"][1]["training_loss"]["difference"] == 0.5);
}

TEST_CASE("an arm without a good run has no figures, and neither have differences from it") {
  Run killed = run_of(1, 4, 1);
  killed.code = 137;
  std::vector<ArmRuns> arms{arm_of("a=1", {killed}), arm_of("a=2", {run_of(1, 4, 100)})};
  auto figures = compare(arms);
  CHECK(std::isnan(figures[0].loss.mean));
  CHECK(std::isnan(figures[1].loss.difference));
  CHECK(figures[1].loss.mean == 4);
  std::string text = comparison_markdown({"base.toml", "0.1.0", 1}, arms);
  CHECK(text.find("with signal 9: no message") != std::string::npos);
  CHECK(text.find("nan") == std::string::npos);
  CHECK(text.find("One repeat") != std::string::npos);
  CHECK(nlohmann::json::parse(comparison_json(kHead, arms))["arms"][0]["tokens_per_second"].is_null());
}

TEST_CASE("tables are aligned, and names cannot break them") {
  std::string text = comparison_markdown(kHead, {kBase, arm_of("b=\"x|y\nz\"", kBase.runs)});
  std::size_t width = 0;
  int lines = 0;
  for (std::size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    std::string line = text.substr(begin, end - begin);
    if (line.empty() || line[0] != '|') {
      width = 0;
      continue;
    }
    std::size_t points = 0;
    for (char c : line) points += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
    if (width > 0) CHECK(points == width);
    width = points;
    ++lines;
  }
  CHECK(lines == 4 + 5);
  CHECK(text.find("x\\|y z") != std::string::npos);
  CHECK(text.find(" none |") != std::string::npos);
}

TEST_CASE("arms of several ranks have the time that their streams wait for each other") {
  CHECK(comparison_markdown(kHead, {kBase}).find("waiting for ranks") == std::string::npos);
  ArmRuns ranks = arm_of("ranks", kBase.runs);
  for (Run& run : ranks.runs)
    for (StepRecord& step : run.log.steps)
      step.waited = 0.125 * static_cast<double>(run.log.tokens_per_step) / step.tokens_per_second;
  const std::vector<ArmFigures> figures = compare({kBase, ranks});
  CHECK(std::isnan(figures[0].waiting));
  CHECK(figures[1].waiting == doctest::Approx(0.125));
  const std::string text = comparison_markdown(kHead, {kBase, ranks});
  CHECK(text.find(" waiting for ranks |") != std::string::npos);
  CHECK(text.find(" 12.5% |") != std::string::npos);
}

TEST_CASE("arms with other batches are distinguished") {
  ArmRuns other = arm_of("b", kBase.runs);
  for (Run& run : other.runs) run.log.tokens_per_step = 64;
  CHECK(comparison_markdown(kHead, {kBase, other}).find("differ in tokens a step") != std::string::npos);
  CHECK(comparison_markdown(kHead, {kBase, kBase}).find("differ in tokens a step") == std::string::npos);
}
