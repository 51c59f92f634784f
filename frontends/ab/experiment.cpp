#include "ab/experiment.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include <nlohmann/json.hpp>

#include "ab/child.h"
#include "base/files/durable_file.h"
#include "quern/error.h"
#include "quern/options.h"

namespace quern::ab {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

void write_file(const std::string& path, const std::string& text) {
  DurableFile file(path);
  file.write(text);
  file.commit();
}

// Repeats may be added to a comparison; everything else has to be as it was.
std::string description(const Experiment& experiment) {
  Json arms = Json::array();
  for (std::size_t i = 0; i < experiment.arms.size(); ++i)
    arms.push_back({{"name", experiment.arms[i].name}, {"config", experiment.resolved[i]}});
  return Json{{"quern", QUERN_VERSION}, {"arms", arms}}.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

void claim(const Experiment& experiment) {
  const std::string path = experiment.directory + "/arms.json", text = description(experiment);
  std::ifstream file(path, std::ios::binary);
  bool other = file ? std::string{std::istreambuf_iterator<char>(file), {}} != text : false;
  if (!file)
    for (const auto& entry : fs::directory_iterator(experiment.directory))
      other = other ||
              !(entry.path().filename() == ".lock" || entry.path().filename().string().starts_with(kTemporaryPrefix));
  if (other)
    throw Error(ErrorCode::config,
                {.where = experiment.directory,
                 .what = file ? "it holds a comparison of other arms, or of another config" : "it is not empty",
                 .expected = "a new directory, or the directory of the same comparison",
                 .next = "choose another with --out, or remove it"});
  if (!file) write_file(path, text);
}

// run.json appears when a run has ended well, so that a repeated call need not run it again. One with other contents
// does not count.
bool read_finished(Run& run) {
  std::ifstream file(run.directory + "/run.json");
  Json json = file ? Json::parse(file, nullptr, false) : Json();
  if (!json.is_object() || !json["seconds"].is_number() || !json["peak_host_bytes"].is_number_integer()) return false;
  run.seconds = json["seconds"];
  run.peak_host_bytes = json["peak_host_bytes"];
  run.log = read_run_log(run.directory + "/log.jsonl");
  return run.log.ended;
}

std::vector<std::string> command(const Experiment& experiment, const Arm& arm, const Run& run) {
  std::vector<std::string> words{experiment.program, "train", experiment.config};
  std::vector<std::string> own{"train.seed=" + std::to_string(run.seed),
                               "log.directory=" + to_string(OptionValue(run.directory)), "log.sinks=[\"jsonl\"]",
                               "log.jsonl.path=\"\""};
  for (const auto& overrides : {experiment.overrides, arm.overrides, own})
    for (const std::string& override : overrides) {
      words.emplace_back("--set");
      words.push_back(override);
    }
  return words;
}

// The signal that ended it early, or 0.
int execute(const Experiment& experiment, const Arm& arm, Run& run) {
  remove_tree(run.directory);
  make_directories(run.directory);
  const std::string err = run.directory + "/stderr.txt";
  ChildResult child = run_child(command(experiment, arm, run), run.directory + "/stdout.txt", err);
  run.code = child.code;
  run.seconds = child.seconds;
  run.peak_host_bytes = child.peak_host_bytes;
  if (child.interrupted) return *child.interrupted;
  const std::string log = run.directory + "/log.jsonl";
  if (fs::exists(log)) run.log = read_run_log(log);
  if (run.code != 0) {
    run.message = last_error(err);
  } else if (!run.log.ended) {
    run.code = static_cast<int>(ErrorCode::resources);
    run.message = "it left no whole log.jsonl: " + last_error(err);
  } else {
    Json json{{"seconds", run.seconds}, {"peak_host_bytes", run.peak_host_bytes}};
    write_file(run.directory + "/run.json", json.dump() + "\n");
  }
  return 0;
}

}  // namespace

ExperimentResult run_experiment(const Experiment& experiment, const Progress& progress) {
  make_directories(experiment.directory);
  ExperimentResult result;
  result.lock = std::make_unique<RunLock>(experiment.directory, "wait for it, or choose another with --out");
  claim(experiment);
  for (const Arm& arm : experiment.arms) result.arms.push_back({arm, {}});
  const int count = experiment.repeats * static_cast<int>(experiment.arms.size());
  int number = 0;
  // Nothing when a signal ended it.
  auto finished = [&](const Arm& arm, std::int64_t seed, const std::string& folder) -> std::optional<Run> {
    Run run;
    run.seed = seed;
    run.directory = experiment.directory + "/" + arm.folder + "/" + folder;
    ++number;
    if (read_finished(run)) {
      ++result.kept;
      return run;
    }
    run.code = -1;
    run.log = {};
    progress(arm, run, number, count);
    result.interrupted = execute(experiment, arm, run);
    if (result.interrupted) return std::nullopt;
    progress(arm, run, number, count);
    return run;
  };
  for (int repeat = 0; repeat < experiment.repeats; ++repeat)
    for (std::size_t i = 0; i < experiment.arms.size(); ++i) {
      const std::int64_t seed = experiment.seeds[i] + repeat;
      std::optional<Run> run = finished(experiment.arms[i], seed, "seed-" + std::to_string(seed));
      if (!run) return result;
      result.arms[i].runs.push_back(std::move(*run));
    }
  return result;
}

}  // namespace quern::ab
