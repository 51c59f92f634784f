// Ranks that are busy for longer than the time-out, with work that nobody can hurry: they are waited for, and whole
// data in rank 0's memory is written, whatever happens to the others.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <list>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "conformance/communicator/rank_processes.h"
#include "quern/run.h"
#include "rank_group.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;

namespace {

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

constexpr const char* kTooSlow = "9";  // seconds, more than twice the time-out of two_ranks

/// In a child: files that end so take so long to be read or to become durable.
void slow(const char* files, const char* seconds) {
  ::setenv("LD_PRELOAD", QUERN_BUILD_DIR "/tests/libquern_slow_files.so", 1);
  ::setenv("QUERN_SLOW_FILES", files, 1);
  ::setenv("QUERN_SLOW_SECONDS", seconds, 1);
}

/// The same that are not there, as where machines do not share a directory.
void lose(const char* files) {
  slow(files, "0");
  ::setenv("QUERN_LOST_FILES", files, 1);
}

constexpr const char* kRead = "/tensors-00000-of-00002.safetensors";        // of a checkpoint that is there
constexpr const char* kWrite = "/.tmp-tensors-00000-of-00002.safetensors";  // of one that rank 0 writes
constexpr const char* kWriteOfOther = "/.tmp-tensors-00001-of-00002.safetensors";

/// Two ranks with a time-out of four seconds, since a loaded machine lets a rank wait for one or two.
Overrides two_ranks(const TinyFiles& files, const Overrides& more) {
  return with(with(of_ranks(2, "ranks"), {"train.accumulation=2", "train.eval_every=0", "checkpoint.every=0",
                                          "parallel.timeout=4", files.run("run")}),
              more);
}

const Overrides kEndless{"train.steps=1000000"};

void await_steps(Child& child, const TinyFiles& files, std::size_t count) {
  while (events(files.at("run"), "step").size() < count) {
    REQUIRE(child.running());
    sleep(0.01);
  }
}

std::int64_t last_logged(const TinyFiles& files) { return logged_losses(files.at("run")).rbegin()->first; }

/// Whether a checkpoint, or another such file, is being written.
bool writes(const TinyFiles& files, const std::string& file = kWrite) try {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(files.at("run")))
    if (entry.path().string().ends_with(file)) return true;
  return false;
} catch (const std::filesystem::filesystem_error&) {  // a folder that is gone by now
  return false;
}

}  // namespace

TEST_CASE("a write that takes longer than the time-out, at the end and after a stop, is waited for") {
  for (const bool other : {false, true}) {
    const char* background = other ? "false" : "true";
    CAPTURE(background);
    TinyFiles files;
    auto slowly = [=] { slow(other ? kWriteOfOther : kWrite, kTooSlow); };
    // Above 0, for the copy that a thread writes from, and never reached.
    const Overrides saves =
        two_ranks(files, {"checkpoint.every=1000000", std::string("checkpoint.background=") + background});
    Child whole(train_arguments(files, with(saves, {"train.steps=3"})), slowly);
    CHECK(whole.wait() == 0);
    CHECK(whole.err() == "");
    CHECK(newest_step(files.at("run")) == 3);
    Child stopped(train_arguments(files, with(saves, kEndless)), slowly);
    await_steps(stopped, files, 6);
    stopped.signal(SIGTERM);
    CHECK(stopped.wait() == 128 + SIGTERM);
    CHECK(stopped.err() == "");
    CHECK(newest_step(files.at("run")) == last_logged(files));
  }
}

TEST_CASE("a run directory that is moved while a checkpoint or the export is written is followed") {
  for (const char* background : {"true", "false"})
    for (const char* file : {kWrite, "/.tmp-model.safetensors"}) {
      CAPTURE(std::string(background));
      CAPTURE(std::string(file));
      TinyFiles files;
      const std::string moved = files.at("moved");
      Child child(train_arguments(files, two_ranks(files, {"train.steps=3", "checkpoint.every=2", "parallel.timeout=60",
                                                           std::string("checkpoint.background=") + background})),
                  [=] { slow(file, "2"); });
      while (!writes(files, file)) {
        REQUIRE(child.running());
        sleep(0.01);
      }
      sleep(0.3);
      std::filesystem::rename(files.at("run"), moved);
      CHECK(child.wait() == 0);
      CHECK(child.err() == "");
      CHECK(newest_step(moved) == 3);
      CHECK(std::filesystem::exists(moved + "/export/model.safetensors"));
      if (file == kWrite) CHECK(events(moved, "checkpoint").back()["path"] == moved + "/checkpoints/step-00000003");
      CHECK(events(moved, "end").back()["export"] == moved + "/export");
      CHECK_FALSE(std::filesystem::exists(files.at("run")));
    }
}

TEST_CASE("a start on which a rank, whichever, takes longer than the time-out to read goes on") {
  TinyFiles files;
  CHECK(quern_train(files, two_ranks(files, {"train.steps=2"})).code == 0);
  for (const int slow_rank : {0, 1}) {
    CAPTURE(slow_rank);
    const std::string steps = "train.steps=" + std::to_string(4 + slow_rank);
    Group group(2, files, two_ranks(files, {steps}), {}, [=](int rank) {
      if (rank == slow_rank) slow(kRead, kTooSlow);
    });
    CHECK(group.wait() == group.all(0));
    CHECK(group.messages() == "");
    CHECK(newest_step(files.at("run")) == 4 + slow_rank);
  }
}

TEST_CASE("a start on which a rank, whichever, takes longer than the time-out for its device goes on") {
  struct Start {
    Start(const char* slow_work, int rank) : work(slow_work), slow_rank(rank) {}
    std::string work;
    int slow_rank;
    TinyFiles files;
    std::unique_ptr<Group> group;
  };
  std::list<Start> starts;
  for (const char* work : {"open", "prepare", "pinned"})
    for (const int rank : {0, 1}) starts.emplace_back(work, rank);
  for (Start& start : starts) {  // together, since they wait
    const Overrides settings{"device.id=slow", "train.steps=2", "memory.moments=host"};
    start.group = std::make_unique<Group>(2, start.files, two_ranks(start.files, settings), Overrides{}, [&](int rank) {
      ::setenv("QUERN_PLUGIN_PATH", QUERN_BUILD_DIR "/tests/slow_plugins", 1);
      ::setenv("QUERN_SLOW_SECONDS", kTooSlow, 1);
      if (rank == start.slow_rank) ::setenv("QUERN_SLOW_DEVICE", start.work.c_str(), 1);
    });
  }
  for (Start& start : starts) {
    CAPTURE(start.work);
    CAPTURE(start.slow_rank);
    CHECK(start.group->wait() == start.group->all(0));
    CHECK(start.group->messages() == "");
    CHECK(newest_step(start.files.at("run")) == 2);
  }
}

TEST_CASE("a save that a program asks for takes longer than the time-out and is waited for") {
  // Ranks of this program, begun again so that the library of delays is in it.
  if (!std::getenv("QUERN_SLOW_FILES")) {
    const std::string self = std::filesystem::read_symlink("/proc/self/exe");
    std::vector<pid_t> again;
    for (const char* file : {kWrite, kWriteOfOther}) {
      again.push_back(::fork());
      if (again.back() != 0) continue;
      slow(file, kTooSlow);
      ::execl(self.c_str(), self.c_str(), "-tc=a save that a program asks for*", nullptr);
      ::_exit(127);
    }
    for (const pid_t process : again) {
      int status = -1;
      CHECK(::waitpid(process, &status, 0) == process);
      CHECK(status == 0);
    }
    return;
  }
  TinyFiles files;
  const auto ranks = conformance::run_ranks(2, 60, [&](int rank) -> std::string {
    for (const char* name : {"QUERN_RANK", "QUERN_LOCAL_RANK"}) ::setenv(name, std::to_string(rank).c_str(), 1);
    for (const char* name : {"QUERN_RANKS", "QUERN_LOCAL_RANKS"}) ::setenv(name, "2", 1);
    TrainingRun run(files.config(), two_ranks(files, {"train.steps=2", "log.sinks=[]"}));
    RunRequests requests;
    run.open_for_training(requests);
    run.start();
    run.step();
    run.save();
    if (newest_step(files.at("run")) != 1) return "not saved";
    return run.train().finished ? "saved" : "not finished";
  });
  for (const conformance::RankOutcome& rank : ranks) CHECK(rank.text == "saved");
}

TEST_CASE("a rank that cannot read the run's directory says so to all") {
  TinyFiles files;
  CHECK(quern_train(files, two_ranks(files, {"train.steps=2"})).code == 0);
  Group group(2, files, two_ranks(files, {"train.steps=3"}), {}, [](int rank) {
    if (rank == 1) lose("/state.json");
  });
  CHECK(group.wait() == std::vector<int>{6, 3});
  for (const int rank : {0, 1}) {
    CHECK(has(group[rank].err(), "rank 1: " + files.at("run") + "/checkpoints/step-00000002/state.json: "));
    CHECK(has(group[rank].err(), "give all ranks one log.directory"));
  }
}

TEST_CASE("a rank that is stopped while it reads a checkpoint is named with that") {
  TinyFiles files;
  CHECK(quern_train(files, two_ranks(files, {"train.steps=2"})).code == 0);
  Group group(2, files, two_ranks(files, {"train.steps=3"}), {}, [](int rank) {
    if (rank == 1) slow(kRead, kTooSlow);
  });
  sleep(3.0);
  group[1].signal(SIGSTOP);
  CHECK(group[0].wait() == 6);
  CAPTURE(group[0].err());
  CHECK(has(group[0].err(), "hang: rank 1 "));
  CHECK(has(group[0].err(), "and was reading a checkpoint"));
  group[1].signal(SIGCONT);
  CHECK(group[1].wait() == 6);
}

TEST_CASE("a checkpoint that rank 0 writes when another rank dies becomes whole, and the end says no more than is so") {
  TinyFiles files;
  Child starter(train_arguments(files, two_ranks(files, with(kEndless, {"checkpoint.every=5"}))),
                [] { slow(kWrite, "12"); });
  while (!writes(files)) {
    REQUIRE(starter.running());
    sleep(0.01);
  }
  sleep(0.5);
  ::kill(rank_among(descendants(starter.process()), 1), SIGKILL);
  CHECK(starter.wait() == 6);
  CAPTURE(starter.err());
  CHECK(has(starter.err(), "quern: warning: rank 1 failed; rank 0 finishes what it writes"));
  CHECK(has(starter.err(), "quern: error: rank 1 was ended by signal 9"));
  CHECK(has(starter.err(), "; step 5 is saved, and the same command continues from there\n"));
  CHECK(newest_step(files.at("run")) == 5);
}

TEST_CASE("a checkpoint whose part a rank has not written when it dies is not made, and the one before stays") {
  TinyFiles files;
  const std::string run = files.at("run");
  CHECK(quern_train(files, two_ranks(files, {"train.steps=3"})).code == 0);
  Child starter(train_arguments(files, two_ranks(files, with(kEndless, {"checkpoint.every=5"}))),
                [] { slow(kWriteOfOther, "60"); });
  while (!writes(files, kWriteOfOther)) {
    REQUIRE(starter.running());
    sleep(0.01);
  }
  ::kill(rank_among(descendants(starter.process()), 1), SIGKILL);
  CHECK(starter.wait() == 6);
  CHECK(has(starter.err(), "quern: error: rank 1 was ended by signal 9 (out of memory?); step 3 is saved, and "));
  CHECK(newest_step(run) == 3);
  CHECK(quern_train(files, two_ranks(files, {"train.steps=5"})).code == 0);
  CHECK(newest_step(run) == 5);
}

TEST_CASE("a rank that cannot write its part of a checkpoint is named by all, and nothing of the checkpoint stays") {
  for (const int culprit : {0, 1})
    for (const char* every : {"0", "2"}) {  // while training waits, and in the background
      CAPTURE(culprit);
      CAPTURE(every);
      TinyFiles files;
      Group group(2, files, two_ranks(files, {"train.steps=4", "checkpoint.every=" + std::string(every)}), {},
                  [=](int rank) {
                    if (rank == culprit) lose(culprit == 0 ? kWrite : kWriteOfOther);
                  });
      const std::vector<int> codes = group.wait();
      const std::string what = "/checkpoints/step-0000000" + std::string(every[0] == '0' ? "4" : "2") +
                               "/tensors-0000" + std::to_string(culprit) + "-of-00002.safetensors: cannot be created";
      for (const int rank : {0, 1}) {
        CAPTURE(group[rank].err());
        CHECK(codes[static_cast<std::size_t>(rank)] == (rank == culprit ? 4 : 6));
        CHECK(has(group[rank].err(), "rank " + std::to_string(culprit) + ": " + files.at("run") + what));
      }
      CHECK(std::filesystem::is_empty(files.at("run") + "/checkpoints"));
    }
}

TEST_CASE("a rank that is killed before any operation on files of its saves loses no checkpoint that is whole") {
  TinyFiles files;
  const std::string run = files.at("run"), straight = files.at("straight");
  const Overrides common = two_ranks(files, {"train.steps=3", "checkpoint.every=1", "checkpoint.keep_last=1",
                                             "checkpoint.export=false", "parallel.timeout=60", "parallel.zero=3"});
  CHECK(quern_train(files, with(common, {files.run("straight")})).code == 0);
  const std::string want = newest_tensors(straight);
  const Losses losses = logged_losses(straight);
  for (const int culprit : {0, 1}) {
    bool killed = true;
    std::set<std::int64_t> newest;
    const int stride = std::getenv("QUERN_SWEEP") ? 1 : culprit == 0 ? 17 : 8;
    for (int number = 1; killed; number += stride) {
      CAPTURE(culprit);
      CAPTURE(number);
      std::filesystem::remove_all(run);
      Group group(2, files, common, {}, [&](int rank) {
        if (rank != culprit) return;
        slow("", "0");
        ::setenv("QUERN_KILL_FILES", "/checkpoints/", 1);
        ::setenv("QUERN_KILL_AT", std::to_string(number).c_str(), 1);
      });
      const std::vector<int> codes = group.wait();
      killed = codes[static_cast<std::size_t>(culprit)] == -SIGKILL;
      CHECK((killed || codes == group.all(0)));
      newest.insert(newest_step(run));
      for (const SkippedCheckpoint& skipped : find_newest(run).skipped) CHECK(skipped.reason == "unfinished");
      const Outcome outcome = quern_train(files, common);
      CAPTURE(outcome.err);
      CHECK(outcome.code == 0);
      CHECK(newest_tensors(run) == want);
      CHECK(logged_losses(run) == losses);
    }
    CHECK(newest == std::set<std::int64_t>{-1, 1, 2, 3});
  }
}

TEST_CASE("signals to the whole group of processes, as terminals and schedulers send them, are all heard, once") {
  TinyFiles files;
  const std::string run = files.at("run");
  int sent = 0;
  for (const int stop : {SIGINT, SIGTERM, SIGHUP, SIGXCPU, SIGINT}) {
    CAPTURE(stop);
    const std::size_t before = events(run, "step").size();
    Child child(train_arguments(files, two_ranks(files, with(kEndless, {"parallel.timeout=60"}))), [] {
      ::setpgid(0, 0);
      ::signal(SIGHUP, SIG_DFL);
    });
    await_steps(child, files, before + 2);
    for (int save = 0; save < 9; ++save) {
      const std::size_t saved = events(run, "checkpoint").size(), steps = events(run, "step").size();
      ::kill(-child.process(), SIGUSR1), ++sent;
      for (int wait = 0; wait < 3000 && events(run, "checkpoint").size() == saved; ++wait) sleep(0.01);
      CHECK(events(run, "checkpoint").size() > saved);
      await_steps(child, files, steps + 1);
    }
    ::kill(-child.process(), stop), ++sent;
    if (stop == SIGTERM) ::kill(child.process(), stop);  // as `timeout` does
    CHECK(child.wait() == 128 + stop);
    CHECK(child.err() == "");
    CHECK(newest_step(run) == last_logged(files));
  }
  CHECK(sent == 50);
}

TEST_CASE("a second signal ends ranks that do not stop, and it is said what that costs") {
  TinyFiles files;
  Child child(train_arguments(files, two_ranks(files, kEndless)), [] { slow(kWrite, "60"); });
  await_steps(child, files, 3);
  child.signal(SIGTERM);
  sleep(1.5);
  child.signal(SIGTERM);
  CHECK(child.wait() == 128 + SIGTERM);
  CHECK(has(child.err(), "quern: warning: ranks did not end by themselves after a second signal and were killed"));
  CHECK(newest_step(files.at("run")) == -1);
}

TEST_CASE("a report of a hang is written by nobody who is waited for, and follows no link") {
  TinyFiles files;
  const std::string run = files.at("run"), elsewhere = files.at("elsewhere");
  Group group(2, files, two_ranks(files, with(kEndless, {"train.accumulation=900"})));
  await_steps(group[0], files, 2);
  REQUIRE(::mkfifo((run + "/hang.rank0.txt").c_str(), 0600) == 0);
  group[1].signal(SIGSTOP);
  CHECK(group[0].wait() == 6);
  CHECK(has(group[0].err(), "hang: rank 0 has waited "));
  CHECK(has(read_text(run + "/hang.rank0.txt"), "hang: rank 0 has waited "));
  std::filesystem::create_symlink(elsewhere, run + "/hang.rank1.txt");
  group[1].signal(SIGCONT);
  CHECK(group[1].wait() == 6);
  CHECK_FALSE(std::filesystem::exists(elsewhere));
  // Neither an earlier run's reports nor its rendezvous files stay.
  std::filesystem::copy(run + "/hang.rank0.txt", run + "/.tmp-rendezvous-gone");
  CHECK(quern_train(files, two_ranks(files, {"train.steps=1"})).code == 0);
  for (const char* name : {"/hang.rank0.txt", "/hang.rank1.txt", "/.tmp-rendezvous-gone"})
    CHECK_FALSE(std::filesystem::exists(std::filesystem::symlink_status(run + name)));
}
