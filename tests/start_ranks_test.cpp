// `quern train` that starts its ranks by itself, and as a rank that another program started.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>

#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;

namespace {

const Overrides kLong{"train.steps=1500", "train.eval_every=0", "checkpoint.every=100", "log.every=1000000"};

/// The process that a quern started as its only rank; 0: none.
pid_t rank_of(const Child& starter) {
  const std::string process = std::to_string(starter.process());
  pid_t rank = 0;
  std::ifstream("/proc/" + process + "/task/" + process + "/children") >> rank;
  return rank;
}

void await_checkpoint(Child& child, const std::string& run) {
  while (!std::filesystem::exists(run) || newest_step(run) < 100) {
    REQUIRE(child.running());
    ::usleep(5000);
  }
}

/// `quern train` as a rank that torchrun started.
Outcome adopted(const TinyFiles& files, const Overrides& overrides, const char* rank, const char* size) {
  return quern_run(train_arguments(files, overrides), [=] {
    for (const char* name : {"RANK", "LOCAL_RANK"}) ::setenv(name, rank, 1);
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) ::setenv(name, size, 1);
  });
}

}  // namespace

TEST_CASE("a rank that is killed is started again from its checkpoint and ends with the same bits") {
  TinyFiles calm, disturbed;
  CHECK(quern_train(calm, kLong).code == 0);
  const std::string run = disturbed.at("run");
  Child child(train_arguments(disturbed, with(kLong, {"parallel.restarts=2"})));
  await_checkpoint(child, run);
  ::kill(rank_of(child), SIGKILL);
  CHECK(child.wait() == 0);
  CHECK(has(child.err(), "quern: warning: rank 0 was ended by signal 9 (out of memory?)\n"));
  CHECK(has(child.err(), "restart 1 of 2\n"));
  CHECK(newest_tensors(run) == newest_tensors(calm.at("run")));
}

TEST_CASE("a signal to the starter saves, and starts nothing again, and one to its rank alone is not heard") {
  TinyFiles files;
  const std::string run = files.at("run");
  Child child(train_arguments(files, with(kLong, {"train.steps=1000000", "parallel.restarts=2"})));
  await_checkpoint(child, run);
  const pid_t rank = rank_of(child);
  CHECK(read_text("/proc/" + std::to_string(rank) + "/comm") == "quern\n");  // its name in ps
  ::kill(rank, SIGTERM);
  const std::int64_t step = newest_step(run);
  while (newest_step(run) < step + 200) REQUIRE(child.running());
  child.signal(SIGTERM);
  CHECK(child.wait() == 128 + SIGTERM);
  CHECK(has(child.out(), "stopped at step " + std::to_string(newest_step(run))));
  CHECK(child.err() == "");
  CHECK(::kill(rank, 0) != 0);
}

TEST_CASE("several ranks that fail say so once, with the rank's name") {
  TinyFiles files;
  std::filesystem::remove(files.at("validation.tok"));
  const Outcome outcome = quern_train(files, {"parallel.ranks=3", "parallel.communicator=memcpy"});
  CHECK(outcome.code > 1);
  CHECK(occurrences(outcome.err, "quern: error: ") == 1);
  CHECK(has(outcome.err, "quern: error: rank "));
}

TEST_CASE("a rank that another program started takes its number of ranks from there") {
  TinyFiles files;
  check_fails(adopted(files, {"parallel.ranks=3"}, "1", "2"), 2,
              {"rank 1: --set parallel.ranks", "the number of ranks that torchrun started", "found 3, expected 2"});
  for (const Overrides& open : {Overrides{}, Overrides{"parallel.ranks=0"}})
    check_fails(adopted(files, open, "1", "2"), 2, {"rank 1: ", "parallel.communicator", "with 2 ranks"});
  check_fails(adopted(files, {}, "2", "2"), 2, {"environment variable RANK", "a number from 0 to 1"});
  const Outcome alone = adopted(files, {"parallel.ranks=1"}, "0", "1");
  CHECK(alone.code == 0);
  CHECK(has(alone.out, "device memory"));
}
