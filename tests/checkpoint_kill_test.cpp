// A run that is killed or told to stop before any of its operations on files leaves whole checkpoints, and goes on from
// them to the same bits. The operations are also in an order that a loss of power cannot undo.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <numeric>
#include <set>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "traced.h"

using namespace quern;
using namespace quern::testing;
namespace fs = std::filesystem;

namespace {

// A checkpoint's file name in a path of the trace, temporaries included.
bool in_checkpoints(const std::string& path) { return path.find("/checkpoints") != std::string::npos; }

std::string write_step(const std::string& run, std::int64_t step, const std::string& config = "") {
  std::vector<float> values(300);
  std::iota(values.begin(), values.end(), static_cast<float>(step));
  CheckpointMeta meta;
  meta.step = step;
  meta.config = config;
  std::vector<NamedView> views{{"a", {values.data(), DType::f32, {100, 3}}}, {"b", {values.data(), DType::bf16, {5}}}};
  return write_checkpoint(run, meta, views);
}

/// A whole save as a run does it: 2 is major and stays, 1 and 3 go.
void save_step_4(const std::string& run) {
  RunLock lock(run);
  remove_leftovers(run);
  write_step(run, 4, "new");
  remove_old_checkpoints(run, {.keep_last = 1, .keep_every = 2}, 4);
}

std::set<std::string> names_in(const std::string& directory) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename());
  return names;
}

std::vector<FileOperation> operations_of(const std::string& run) {
  std::vector<FileOperation> all;
  REQUIRE(run_traced(
              run, [&] { save_step_4(run); },
              [&](const FileOperation& next) {
                all.push_back(next);
                return 0;
              }) == 0);
  return all;
}

/// Sends `signal` before the operation with that number (from 0) of those that `counts` picks. Returns the program's
/// code, and sets `reached`.
template <class Counts>
int train_interrupted(const std::string& run, const std::vector<std::string>& words, int signal, int number,
                      bool& reached, Counts counts) {
  int seen = 0;
  reached = false;
  return run_traced(run, words, [&](const FileOperation& next) {
    if (!counts(next) || seen++ != number) return 0;
    reached = true;
    return signal;
  });
}

#define NEED_TRACING()                                                 \
  if (!can_trace()) {                                                  \
    MESSAGE("skipped: this machine does not let processes be traced"); \
    return;                                                            \
  }

}  // namespace

TEST_CASE("killed before each of its file operations, a save leaves the checkpoint before it or its own") {
  NEED_TRACING();
  TestDirectory directory;
  const std::string begin = directory / "begin", run = directory / "run";
  for (bool again : {false, true}) {  // again: over an older checkpoint of the same step
    CAPTURE(again);
    for (std::int64_t step : {1, 2, 3}) write_step(begin, step, "old");
    if (again) write_step(begin, 4, "old");
    int code = -SIGKILL, killed_at = 0, older = 0, newer = 0;
    for (; code == -SIGKILL; ++killed_at) {
      fs::remove_all(run);
      fs::copy(begin, run, fs::copy_options::recursive);
      int seen = 0;
      code = run_traced(
          run, [&] { save_step_4(run); }, [&](const FileOperation&) { return seen++ == killed_at ? SIGKILL : 0; });
      CAPTURE(killed_at);
      NewestCheckpoint newest = find_newest(run);
      REQUIRE(newest.checkpoint);
      bool is_new = newest.checkpoint->meta.config == "new";
      CHECK(newest.checkpoint->meta.step == (is_new || again ? 4 : 3));
      CHECK(newest.checkpoint->tensors.read_floats("a").at(7) == static_cast<float>(newest.checkpoint->meta.step) + 7);
      for (const SkippedCheckpoint& skipped : newest.skipped) CHECK(skipped.reason == "unfinished");
      CHECK(read_checkpoint(checkpoint_path(run, 2)).meta.step == 2);
      CHECK((is_new || older == killed_at));  // once it is there, it stays
      (is_new ? newer : older) += 1;
      save_step_4(run);
      CHECK(names_in(run + "/checkpoints") == std::set<std::string>{"step-00000002", "step-00000004"});
    }
    CHECK(code == 0);
    CHECK(older > 10);
    CHECK(newer > 5);
    MESSAGE("killed before each of " << killed_at - 1 << " operations");
  }
}

TEST_CASE("a save syncs files before their names and names before it removes anything") {
  NEED_TRACING();
  TestDirectory directory;
  const std::string run = directory / "run";
  for (std::int64_t step : {1, 2, 3}) write_step(run, step);
  std::vector<FileOperation> all = operations_of(run);
  // Files with content that is not on the disk, and directories with names that are not.
  std::set<std::string> files, directories;
  int renames = 0;
  for (const FileOperation& op : all) {
    CAPTURE(op.call);
    CAPTURE(op.path);
    if (!in_checkpoints(op.path)) continue;  // the lock's file
    std::string parent = fs::path(op.path).parent_path();
    if (op.call == "open" || op.call == "write") files.insert(op.path);
    if (op.call == "fsync") files.erase(op.path), directories.erase(op.path);
    if (op.call == "rename") {
      bool new_checkpoint = op.to == checkpoint_path(run, 4);
      CHECK(files.count(op.path) == 0);
      if (new_checkpoint) CHECK(directories.count(op.path) == 0);
      directories.insert(fs::path(op.to).parent_path());
      ++renames;
    }
    if (op.call == "remove" || (op.call == "rename" && op.to.ends_with("-removed"))) {
      // Nothing that a checkpoint consists of is still to be written when an old one goes.
      CHECK(files.empty());
      if (op.call == "rename") directories.erase(parent);  // of this very rename
      CHECK(directories.count(run + "/checkpoints") == 0);
    }
  }
  CHECK(files.empty());
  CHECK(renames == 5);  // two files and their directory; two that go
}

TEST_CASE("a run that is killed at any stage of its saves goes on to the same bits") {
  NEED_TRACING();
  TinyFiles files;
  Overrides common{"precision.id=e4m3",  "precision.e4m3.history=3",   "train.steps=3",
                   "checkpoint.every=1", "checkpoint.keep_last=1",     "checkpoint.export=false",
                   "train.eval_every=0", "data.tokens.validation=\"\""};
  Overrides straight = common;
  straight.push_back(files.run("straight"));
  CHECK(quern_train(files, straight).code == 0);
  const std::string want = newest_tensors(files.at("straight"));
  const Losses losses = logged_losses(files.at("straight"));
  const std::string run = files.at("run");
  // Of a file's many writes, the first two: the header and the first tensor.
  auto counts = [writes = 0, file = std::string()](const FileOperation& next) mutable {
    if (!in_checkpoints(next.path)) return false;
    writes = next.path == file ? writes + (next.call == "write") : 0;
    file = next.path;
    return writes <= 2;
  };
  std::set<std::int64_t> resumed_from;
  bool reached = true;
  int kills = 0;
  for (int number = 0; reached; number += 3) {
    CAPTURE(number);
    fs::remove_all(run);
    int code = train_interrupted(run, train_arguments(files, common), SIGKILL, number, reached, counts);
    CHECK(code == (reached ? -SIGKILL : 0));
    kills += reached;
    resumed_from.insert(newest_step(run));
    Outcome outcome = quern_train(files, common);
    CAPTURE(outcome.err);
    CHECK(outcome.code == 0);
    CHECK(newest_tensors(run) == want);
    CHECK(logged_losses(run) == losses);
    // Killed before the last removal, it has nothing more to save, and only a save removes.
    CHECK(names_in(run + "/checkpoints").size() <= 2);
  }
  CHECK(resumed_from == std::set<std::int64_t>{-1, 1, 2, 3});
  MESSAGE("killed " << kills << " times");
}

TEST_CASE("a signal at any moment saves every finished step and leaves with its code") {
  NEED_TRACING();
  TinyFiles files;
  Overrides common{"train.steps=4", "checkpoint.every=3", "train.eval_every=2"};
  Overrides straight = common;
  straight.push_back(files.run("straight"));
  CHECK(quern_train(files, straight).code == 0);
  const std::string want = newest_tensors(files.at("straight")), run = files.at("run");
  const Losses losses = logged_losses(files.at("straight"));
  auto logs = [](const FileOperation& next) { return next.call == "write" && next.path.ends_with("log.jsonl"); };
  auto others = [&, file = std::string()](const FileOperation& next) mutable {
    bool same = next.path == file && next.call == "write";
    file = next.path;
    return !same && !logs(next);
  };
  std::set<std::int64_t> stopped_at;
  int signals = 0;
  auto try_number = [&](int number, const auto& counts) {
    CAPTURE(number);
    fs::remove_all(run);
    bool reached = false;
    int signal = number % 2 == 0 ? SIGTERM : SIGINT;
    int code = train_interrupted(run, train_arguments(files, common), signal, number, reached, counts);
    CHECK(code == (reached ? 128 + signal : 0));
    std::int64_t newest = newest_step(run);
    if (reached) stopped_at.insert(newest);
    signals += reached;
    if (auto steps = events(run, "step"); !steps.empty()) CHECK(steps.back().at("step") == newest);
    Outcome outcome = quern_train(files, common);
    CAPTURE(outcome.err);
    CHECK(outcome.code == 0);
    CHECK(newest_tensors(run) == want);
    CHECK(logged_losses(run) == losses);
    std::set<std::int64_t> evaluated;
    for (const auto& line : events(run, "eval")) evaluated.insert(line.at("step").get<std::int64_t>());
    CHECK(evaluated == std::set<std::int64_t>{2, 4});
    CHECK(fs::exists(run + "/export/model.safetensors"));
    return reached;
  };
  for (int number = 0; try_number(number, logs);) ++number;
  for (int number = 0; try_number(number, others);) number += 5;
  MESSAGE("interrupted at " << signals << " operations");
  for (std::int64_t step : {-1, 1, 2, 3, 4}) {
    CAPTURE(step);
    CHECK(stopped_at.count(step) == 1);
  }
}

TEST_CASE("a second signal while a checkpoint is written leaves at once, and no half of it is taken for one") {
  NEED_TRACING();
  TinyFiles files;
  const std::string run = files.at("run");
  Overrides common{"train.steps=1000000", "checkpoint.every=1", "checkpoint.export=false"};
  int writes = 0;
  int code = run_traced(run, train_arguments(files, common), [&](const FileOperation& next) {
    bool second = next.call == "write" && next.path.find(".tmp-step-00000002/") != std::string::npos;
    if (!second || ++writes < 5) return 0;
    if (writes == 8) ::usleep(1100000);  // a second signal within a second of the first counts as the first
    return writes == 5 ? SIGTERM : writes == 8 ? SIGINT : 0;
  });
  CHECK(code == 130);
  NewestCheckpoint newest = find_newest(run);
  REQUIRE(newest.checkpoint);
  CHECK(newest.checkpoint->meta.step == 1);
  REQUIRE(newest.skipped.size() == 1);
  CHECK(newest.skipped[0].reason == "unfinished");
  CHECK(quern_train(files, {"train.steps=2", "checkpoint.export=false"}).code == 0);
  CHECK(newest_step(run) == 2);
}
