// Faults of the disk and of other processes while a run saves or resumes: each ends the run with its code and a message
// that says what to do, and what was saved before stays.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>

#include "data/tokens/token_file.h"
#include "end_to_end.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;
namespace fs = std::filesystem;

namespace {

std::string quoted(const std::string& word) { return "'" + word + "'"; }

/// `quern train` after `before` and before `after`, in one shell; `with` are words in front of that shell's name.
Outcome shell_train(const TinyFiles& files, const Overrides& overrides, const std::string& with,
                    const std::string& before, const std::string& after = "true") {
  std::string command = QUERN_BUILD_DIR "/bin/quern";
  for (const std::string& word : train_arguments(files, overrides)) command += " " + quoted(word);
  write_text(files.at("script"), before + " || exit 99\n" + command + " >" + files.at("out") + " 2>" + files.at("err") +
                                     "\ncode=$?\n" + after + "\nexit $code\n");
  int status = std::system((with + " sh " + files.at("script") + " 2>/dev/null").c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(files.at("out")), read_text(files.at("err"))};
}

const std::string kOwnMounts = "unshare --user --map-root-user --mount";

bool can_mount() {
  TestDirectory directory;
  return std::system((kOwnMounts + " mount -t tmpfs none " + directory.path() + " 2>/dev/null").c_str()) == 0;
}

#define NEED_MOUNTS()                                                  \
  if (!can_mount()) {                                                  \
    MESSAGE("skipped: this machine does not let users mount a tmpfs"); \
    return;                                                            \
  }

std::string log_outside(const TinyFiles& files) { return "log.jsonl.path=" + files.at("log.jsonl"); }

const char* kBackground[] = {"checkpoint.background=true", "checkpoint.background=false"};

}  // namespace

TEST_CASE("a disk that fills up ends the run with what was saved before it, and the run goes on elsewhere") {
  NEED_MOUNTS();
  for (const char* background : kBackground) {
    TinyFiles files;
    const std::string run = files.at("run"), copy = files.at("copy");
    Overrides all{background, "checkpoint.every=1", "checkpoint.keep_last=0", "checkpoint.export=false"};
    Overrides straight = all;
    straight.push_back(files.run("straight"));
    CHECK(quern_train(files, straight).code == 0);
    std::string size = std::to_string(newest_tensors(files.at("straight")).size() * 5 / 2);  // of two checkpoints
    Overrides full = all;
    full.push_back(log_outside(files));
    fs::create_directories(run);
    fs::create_directories(copy);
    check_fails(shell_train(files, full, kOwnMounts, "mount -t tmpfs -o size=" + size + " none " + run,
                            "cp -a " + run + "/. " + copy),
                4,
                {run + "/checkpoints/step-00000003/tensors.safetensors: cannot be written", "No space left on device",
                 "free disk space", "; step 2 is saved, and the same command continues from there"});
    CHECK(newest_step(copy) == 2);
    CHECK(find_newest(copy).skipped.empty());
    all.push_back(files.run("copy"));
    CHECK(quern_train(files, all).code == 0);
    CHECK(newest_tensors(copy) == newest_tensors(files.at("straight")));
  }
}

TEST_CASE("a limit on file sizes is an error, not the end by a signal") {
  for (const char* background : kBackground) {
    TinyFiles files;
    check_fails(shell_train(files, {background, "checkpoint.every=1", log_outside(files)}, "", "ulimit -f 64"), 4,
                {"tensors.safetensors: cannot be written", "File too large", "ulimit -f",
                 "; no step is saved in " + files.at("run") + ", and the same command starts again"});
    CHECK(newest_step(files.at("run")) == -1);
    CHECK(fs::is_empty(files.at("run") + "/checkpoints"));
    CHECK(quern_train(files, {"train.steps=2"}).code == 0);
    check_fails(shell_train(files, {background, "checkpoint.every=1", log_outside(files)}, "", "ulimit -f 64"), 4,
                {"step-00000003/tensors.safetensors: cannot be written", "ulimit -f",
                 "; step 2 is saved, and the same command continues from there"});
    CHECK(find_newest(files.at("run")).skipped.empty());
    CHECK(newest_step(files.at("run")) == 2);
  }
}

TEST_CASE("directories that cannot be written are named") {
  NEED_MOUNTS();
  TinyFiles files;
  const std::string run = files.at("run"), checkpoints = run + "/checkpoints";
  fs::create_directories(checkpoints);
  auto read_only = [](const std::string& directory) {
    return "mount --bind " + directory + " " + directory + " && mount -o remount,bind,ro " + directory;
  };
  check_fails(shell_train(files, {}, kOwnMounts, read_only(run)), 4,
              {run + "/.lock", "Read-only file system", "choose a directory that this user can write"});
  check_fails(shell_train(files, {}, kOwnMounts, read_only(checkpoints)), 4,
              {checkpoints + ": no file can be written there: found Read-only file system",
               "choose a directory that this user can write"});
  CHECK(fs::is_empty(checkpoints));
  CHECK_FALSE(fs::exists(run + "/log.jsonl"));
}

TEST_CASE("checkpoints that could not be written are found out before training") {
  TinyFiles files;
  const std::string run = files.at("run"), checkpoints = run + "/checkpoints";
  fs::create_directories(run);
  fs::create_directory_symlink("/proc/self/fdinfo", checkpoints);  // where not even root makes files
  check_fails(quern_train(files, {"checkpoint.every=0"}), 4, {checkpoints + ": no file can be written there: found "});
  CHECK_FALSE(fs::exists(run + "/log.jsonl"));
}

TEST_CASE("a flipped bit in any file of a checkpoint is reported, and the checkpoint before is taken") {
  TinyFiles files;
  const std::string run = files.at("run");
  Overrides all{"checkpoint.export=false", "checkpoint.keep_last=0"};
  CHECK(quern_train(files, all).code == 0);
  const std::string want = newest_tensors(run), newest = checkpoint_path(run, 8);
  const Losses losses = logged_losses(run);
  for (const std::string name : {"tensors.safetensors", "state.json"}) {
    const std::string good = read_text(newest + "/" + name);
    for (double place : {0.01, 0.5, 0.99}) {
      CAPTURE(name);
      CAPTURE(place);
      std::string bad = good;
      auto at = static_cast<std::size_t>(place * static_cast<double>(good.size()));
      if (name == "state.json") at = bad.find_first_of("abcdef0123456789", at);  // its text, so that it stays JSON
      bad[at] = static_cast<char>(bad[at] ^ 1);
      write_text(newest + "/" + name, bad);
      Outcome outcome = quern_train(files, all);
      CAPTURE(outcome.out);
      CHECK(outcome.code == 0);
      CHECK(occurrences(outcome.out, "passed over " + newest + ": " + newest + "/" + name) == 1);
      if (name == "tensors.safetensors" && place > 0.1) CHECK(has(outcome.out, "checksum"));
      CHECK(has(outcome.out, "resumed at step 6 from"));
      CHECK(newest_tensors(run) == want);
      CHECK(logged_losses(run) == losses);
    }
  }
  for (std::int64_t step : {3, 6, 8}) {
    std::string path = checkpoint_path(run, step) + "/tensors.safetensors", text = read_text(path);
    text.back() = static_cast<char>(text.back() ^ 0x40);
    write_text(path, text);
  }
  check_fails(quern_train(files, all), 3,
              {"step-00000008: no checkpoint of the run is whole", "checksum", "move the run directory away"});
}

TEST_CASE("other files in the checkpoints' directory are reported once and kept, or removed where a run left them") {
  TinyFiles files;
  const std::string run = files.at("run"), checkpoints = run + "/checkpoints";
  Overrides all{"checkpoint.export=false"};
  for (const char* name : {"/junk/deep", "/step-12", "/step-00000099", "/.tmp-step-00000098"})
    fs::create_directories(checkpoints + name);
  fs::create_directories(run + "/.tmp-export");
  write_text(checkpoints + "/notes.txt", "mine");
  check_fails(quern_train(files, all), 3, {"step-00000099: no checkpoint of the run is whole", "state.json"});
  fs::remove(checkpoints + "/step-00000099");
  CHECK(quern_train(files, all).code == 0);
  fs::create_directories(checkpoints + "/step-00000099");
  fs::create_directories(checkpoints + "/.tmp-step-00000098");
  fs::create_directories(run + "/.tmp-export");
  Outcome again = quern_train(files, all);
  CHECK(again.code == 0);
  for (const char* name : {"/junk", "/notes.txt", "/step-12"})
    CHECK(occurrences(again.out, "not touched: " + checkpoints + name + ", which is not a checkpoint") == 1);
  CHECK(occurrences(again.out, "passed over " + checkpoints + "/step-00000099") == 1);
  CHECK(occurrences(again.out, "removed " + checkpoints + "/.tmp-step-00000098, left unfinished") == 1);
  CHECK(occurrences(again.out, "removed " + run + "/.tmp-export, left unfinished") == 1);
  CHECK(fs::exists(checkpoints + "/junk/deep"));
  CHECK(has(again.out, "resumed at step 8"));
}

TEST_CASE("a second run in a directory is refused with the process that has it") {
  TinyFiles files;
  Child first(train_arguments(files, {"train.steps=1000000", "checkpoint.every=0"}));
  while (first.running() && events(files.at("run"), "step").empty()) ::usleep(1000);
  check_fails(quern_train(files, {}), 4,
              {"another run writes into this directory", "found process " + std::to_string(first.process()),
               "wait for it, or choose another log.directory"});
  first.signal(SIGKILL);
  CHECK(first.wait() == -SIGKILL);
  CHECK(quern_train(files, {"train.steps=1"}).code == 0);  // the lock went with its process
}

TEST_CASE("a run keeps its directory when the lock's file goes, and when the directory is moved or removed") {
  TinyFiles files;
  const std::string run = files.at("run"), moved = files.at("moved");
  const Overrides endless{"train.steps=1000000", "checkpoint.every=0", "log.sinks=[\"jsonl\"]"};
  auto await_step = [](Child& child, const std::string& directory) {
    while (child.running() && events(directory, "step").empty()) ::usleep(1000);
  };
  Child first(train_arguments(files, endless));
  await_step(first, run);
  fs::remove(run + "/.lock");
  check_fails(quern_train(files, {}), 4, {"another run writes into this directory"});
  fs::rename(run, moved);
  Child second(train_arguments(files, endless));
  await_step(second, run);
  first.signal(SIGTERM);
  CHECK(first.wait() == 143);
  CHECK(newest_step(moved) == events(moved, "step").back().at("step"));
  CHECK(newest_step(run) == -1);
  fs::remove_all(run);
  second.signal(SIGTERM);
  CHECK(second.wait() == 143);
  CHECK(newest_step(run) > 0);
}

TEST_CASE("a run that ends by bad data saves its steps first, and goes on from there to the same bits") {
  TinyFiles files;
  const std::string run = files.at("run"), tokens = files.at("train.tok"), good = read_text(tokens);
  const Overrides all{"precision.id=e4m3",  "schedule.id=constant", "train.accumulation=3",
                      "train.eval_every=0", "checkpoint.every=0",   "checkpoint.export=false"};
  auto train_to = [&](std::int64_t step, const std::string& name) {
    Overrides overrides = all;
    overrides.insert(overrides.end(), {"train.steps=" + std::to_string(step), files.run(name)});
    return train_arguments(files, overrides);
  };
  Child child(train_to(1000000, "run"));
  while (child.running() && events(run, "step").size() < 2) ::usleep(1000);
  std::fstream(tokens, std::ios::in | std::ios::out | std::ios::binary).seekp(64)
      << std::string(good.size() - 64, '\xff');  // in place: the file is open
  CHECK(child.wait() == 3);
  CHECK(has(child.err(), "train.tok"));
  const std::int64_t last = events(run, "step").back().at("step");
  CHECK(newest_step(run) == last);
  CHECK(events(run, "checkpoint").back().at("step") == last);
  write_text(tokens, good);
  CHECK(quern_run(train_to(last + 3, "run")).code == 0);
  CHECK(quern_run(train_to(last + 3, "straight")).code == 0);
  CHECK(newest_tensors(run) == newest_tensors(files.at("straight")));
  CHECK(logged_losses(run) == logged_losses(files.at("straight")));
}

TEST_CASE("checkpoints written behind training are those that it waits for") {
  TinyFiles files;
  for (int i : {0, 1}) {
    Overrides all{kBackground[i],           files.run(std::to_string(i)), "precision.id=e4m3",
                  "checkpoint.every=1",     "checkpoint.keep_last=2",     "checkpoint.keep_every=3",
                  "checkpoint.export=false"};
    CHECK(quern_train(files, all).code == 0);
  }
  for (int step : {1, 2, 3, 4, 5, 6, 7, 8}) {
    CAPTURE(step);
    std::string a = checkpoint_path(files.at("0"), step), b = checkpoint_path(files.at("1"), step);
    bool stays = step % 3 == 0 || step > 6;
    CHECK(fs::exists(a) == stays);
    CHECK(fs::exists(b) == stays);
    if (!stays) continue;
    CHECK(read_text(a + "/tensors.safetensors") == read_text(b + "/tensors.safetensors"));
    CheckpointMeta meta_a = read_checkpoint(a).meta, meta_b = read_checkpoint(b).meta;
    CHECK(meta_a.config != meta_b.config);  // it says how it was written
    meta_a.config = meta_b.config;
    CHECK(meta_a == meta_b);
  }
  check_fails(quern_train(files, {"checkpoint.every=2", "checkpoint.keep_every=3"}), 2,
              {"checkpoint.keep_every: found 3 with every = 2, expected a multiple of every"});
  auto size = [&](const char* background) {
    Outcome plan = quern_run({"plan", files.config(), "--set", background});
    std::size_t at = plan.out.find("checkpoint copy");
    return at == std::string::npos ? "" : plan.out.substr(at, plan.out.find('\n', at) - at);
  };
  CHECK(has(size(kBackground[0]), "KiB"));
  CHECK(size(kBackground[1]) == "");
}

TEST_CASE("a signal cuts an evaluation short, and the run makes it when it goes on") {
  TinyFiles files;
  const std::string run = files.at("run");
  TokenFileContent content{
      .tokens = std::vector<std::int32_t>(3000000, 1), .mask = {}, .vocabulary = 64, .separator = -1};
  write_token_file(files.at("long.tok"), content);
  Overrides all{"data.tokens.validation=" + files.at("long.tok"), "train.eval_every=1", "train.steps=2",
                "checkpoint.export=false"};
  Child child(train_arguments(files, all));
  while (child.running() && events(run, "step").empty()) ::usleep(1000);
  ::usleep(50000);
  child.signal(SIGTERM);
  CHECK(child.wait() == 143);
  CHECK(events(run, "eval").empty());
  CHECK(events(run, "step").size() == 1);
  REQUIRE(newest_step(run) == 1);
  CHECK_FALSE(find_newest(run).checkpoint->meta.evaluated);
  all.push_back("train.eval_batches=2");
  CHECK(quern_train(files, all).code == 0);
  std::vector<nlohmann::json> evaluations = events(run, "eval");
  REQUIRE(evaluations.size() == 2);
  CHECK(evaluations[0].at("step") == 1);
  CHECK(find_newest(run).checkpoint->meta.evaluated);
}
