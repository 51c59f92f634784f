// Processes that do all that ranks should not; their fate, and the messages.
#include "launch/supervisor.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

#include "base/files/test_directory.h"
#include "conformance/communicator/rank_processes.h"
#include "launch/local_ranks.h"
#include "launch/rank_place.h"

using namespace quern;
using conformance::RankOutcome;

namespace {

const Patience kShort{.by_itself = 0.5, .on_request = 0.5, .insists = 0.1, .stopped = 1.5};
const char* const kForever = "while :; do sleep 0.05; done";
/// Waits for the next signal that the starter sends.
const std::string kHears = "read signal <&3; ";
/// Ends as a program does that such a signal stops.
const std::string kObeys = kHears + "exit $((128 + signal))";

/// Whether the process still does something: one that nobody waited for keeps its number.
bool runs(pid_t process) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(process) + "/stat"), stat);
  return !stat.empty() && stat[stat.rfind(')') + 2] != 'Z';
}

struct Outcome {
  std::string verdict;  // code, whether it was stopped, and the cause
  std::string warned, output;
  double seconds = 0;
};

/// Each script is a rank; `directory` is where they write their process ids, and all of them are gone afterwards.
/// `prepare` is called in the process that starts them.
Outcome outcome_of(
    const std::vector<std::string>& scripts, const std::function<void()>& prepare = [] {}) {
  const TestDirectory directory;
  std::vector<RankProcess> ranks;
  for (std::size_t i = 0; i < scripts.size(); ++i)
    ranks.push_back({.name = "rank " + std::to_string(i),
                     .words = {"sh", "-c", "echo $$ >$DIR/" + std::to_string(i) + "\n" + scripts[i]},
                     .environment = {{"DIR", directory.path()}}});
  const auto begin = std::chrono::steady_clock::now();
  // In a process of its own, which signals may reach.
  const RankOutcome outcome = conformance::run_ranks(1, 60, [&](int) {
    std::string warned;
    prepare();
    const RunEnd end = supervise(
        ranks, [&](const std::string& line) { warned += line; }, kShort);
    return std::to_string(end.code) + (end.stopped ? " stopped " : " ") + end.cause + "\1" + warned + "\1" + end.output;
  })[0];
  Outcome result;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const std::size_t first = outcome.text.find('\1'), second = outcome.text.find('\1', first + 1);
  result.verdict = outcome.text.substr(0, first);
  if (second != std::string::npos) {
    result.warned = outcome.text.substr(first + 1, second - first - 1);
    result.output = outcome.text.substr(second + 1);
  }
  for (std::size_t i = 0; i < scripts.size(); ++i) {
    pid_t process = 0;
    std::ifstream(directory / std::to_string(i)) >> process;
    CAPTURE(i);
    for (int wait = 0; wait < 100 && runs(process); ++wait) ::usleep(20000);
    CHECK(!runs(process));
  }
  return result;
}

}  // namespace

TEST_CASE("ranks that end well, however many") {
  for (const std::size_t size : {1u, 2u, 4u, 9u})
    CHECK(outcome_of(std::vector<std::string>(size, "exit 0")).verdict == "0 ");
  CHECK(outcome_of({"exit 0", "sleep 1"}).verdict == "0 ");  // one may take longer than the patience with failures
}

TEST_CASE("the first cause is reported, once, and with the rank's name") {
  const std::string follows = "sleep 0.1; echo 'quern: error: rank 2 is gone' >&2; exit 6";
  CHECK(outcome_of({follows, follows, "sleep 0.4; printf 'quern: error: no\\n  data\\n' >&2; exit 3"}).verdict ==
        "3 rank 2: no\n  data");
  CHECK(outcome_of({follows, follows, "sleep 0.4; kill -9 $$"}).verdict ==
        "6 rank 2 was ended by signal 9 (out of memory?)");
  CHECK(outcome_of({follows, "sleep 0.3; exit 6"}).verdict == "6 rank 0: rank 2 is gone");
  CHECK(outcome_of({"echo 'quern: error: rank 0: no data' >&2; exit 3"}).verdict == "3 rank 0: no data");
  const Outcome odd = outcome_of({"echo hello >&2", "echo 'a library: assertion' >&2; exit 77"});
  CHECK(odd.verdict == "77 rank 1 ended with exit code 77");
  CHECK(odd.output == "a library: assertion\n");
  CHECK(odd.warned == "hello\n");
  const Outcome library = outcome_of({"exit 0", "echo 'MPI: no' >&2; exit 1"});
  CHECK(library.verdict == "6 rank 1 was ended by a library that it uses, with exit code 1");
  CHECK(library.output == "MPI: no\n");
}

TEST_CASE("when one fails, all end within the patience") {
  const std::string deaf = std::string("trap '' TERM INT; ") + kForever;
  for (const std::size_t size : {2u, 9u}) {
    std::vector<std::string> scripts(size, deaf);
    scripts.back() = "sleep 0.2; exit 4";
    const Outcome outcome = outcome_of(scripts);
    CHECK(outcome.verdict == "4 rank " + std::to_string(size - 1) + " ended with exit code 4");
    CHECK(outcome.seconds < 10);
  }
  // One that fails late, while the others have gone for its sake: still the cause.
  CHECK(outcome_of({"exit 6", kHears + "sleep 0.2; exit 5"}).verdict == "5 rank 1 ended with exit code 5");
  CHECK(outcome_of({"exit 6", "kill -STOP $$"}).verdict == "6 rank 0 ended with exit code 6");
}

TEST_CASE("ranks that print without end block nobody") {
  const Outcome outcome = outcome_of({"sleep 0.5; exit 3", "exec yes", "exec yes >&2", "yes quern: error: x >&2"});
  CHECK(outcome.verdict == "3 rank 0 ended with exit code 3");
  CHECK(outcome.seconds < 10);
}

TEST_CASE("signals go on to all ranks, over their links alone") {
  CHECK(outcome_of({kObeys, "sleep 0.2; kill -TERM $PPID; " + kObeys}).verdict == "143 stopped ");
  CHECK(outcome_of({kObeys, "sleep 0.2; kill -HUP $PPID; " + kObeys}).verdict == "129 stopped ");
  CHECK(outcome_of({"kill -TERM $$; kill -INT $$; sleep 0.2", "sleep 0.1"}).verdict == "0 ");
  // One that is ignored, as under nohup, is not sent on; one that waits since before the start is.
  CHECK(outcome_of({"sleep 0.2; kill -HUP $PPID; kill -TERM $PPID; " + kObeys}, [] {
          ::signal(SIGHUP, SIG_IGN);
        }).verdict == "143 stopped ");
  CHECK(outcome_of({kObeys}, [] {
          static const WaitingSignals waiting;
          ::raise(SIGTERM);
        }).verdict == "143 stopped ");
  const std::string saves = kHears + "test $signal = 10";
  CHECK(outcome_of({saves, "sleep 0.2; kill -USR1 $PPID"}).verdict == "0 ");
}

TEST_CASE("a second signal insists, but not one that comes at once") {
  const std::string twice = "sleep 0.2; kill -TERM $PPID; kill -TERM $PPID; ";
  CHECK(outcome_of({kHears + "sleep 1.5; exit 143", twice + kHears + "exit 143"}).verdict == "143 stopped ");
  const Outcome insisted =
      outcome_of({kForever, "sleep 0.2; kill -TERM $PPID; sleep 0.4; kill -TERM $PPID; " + std::string(kForever)});
  CHECK(insisted.verdict == "143 stopped ");
  CHECK(insisted.warned.find("were killed; steps since the last checkpoint are lost") != std::string::npos);
}

TEST_CASE("a rank that asks for time has it, unless a signal insists") {
  const std::string asks = "printf + >&3; ", finishes = "sleep 3; printf - >&3; ";
  const Outcome given = outcome_of({asks + finishes + kForever, "sleep 0.2; exit 4"});
  CHECK(given.verdict == "4 rank 1 ended with exit code 4");
  CHECK(given.warned == "quern: warning: rank 1 failed; rank 0 finishes what it writes\n");
  CHECK(given.seconds > 3);
  CHECK(given.seconds < 10);
  const std::string insists = "sleep 0.2; kill -TERM $PPID; sleep 0.4; kill -TERM $PPID; exit 4";
  const Outcome taken = outcome_of({asks + kForever, insists});
  CHECK(taken.verdict == "4 stopped rank 1 ended with exit code 4");
  CHECK(taken.seconds < 10);
}

TEST_CASE("a rank that is stopped while it has time is ended, and why it had time is said at once") {
  const Outcome stopped =
      outcome_of({"printf + >&3; kill -STOP $$; exit 0", "sleep 0.2; echo quern: error: no more memory >&2; exit 4"});
  CHECK(stopped.verdict == "4 rank 1: no more memory");
  CHECK(stopped.warned ==
        "quern: warning: rank 1: no more memory; rank 0 finishes what it writes\n"
        "quern: warning: rank 0 was stopped by a signal while it writes, and is ended\n");
  CHECK(stopped.seconds < 10);
  const Outcome goes_on =
      outcome_of({"printf + >&3; (sleep 0.9; kill -CONT $$) & kill -STOP $$; sleep 2; printf - >&3; exec sleep 60",
                  "sleep 0.1; exit 4"});
  CHECK(goes_on.warned == "quern: warning: rank 1 failed; rank 0 finishes what it writes\n");
}

TEST_CASE("no rank outlives its starter") {
  const Outcome outcome = outcome_of({"sleep 0.2; kill -9 $PPID; " + std::string(kForever), kForever});
  CHECK(outcome.verdict == "was killed by signal 9");
}

TEST_CASE("a program that cannot be started is an error of its rank") {
  const RunEnd end = supervise(
      {{.name = "rank 0", .words = {"/nowhere/quern"}}}, [](const std::string&) {}, kShort);
  CHECK(end.code == 4);
  CHECK(end.cause == "rank 0: the program cannot be started: No such file or directory");
}

TEST_CASE("local ranks have all that rank_place() reads") {
  const std::vector<RankProcess> ranks = local_ranks(2, {this_program(), "train", "a.toml"});
  REQUIRE(ranks.size() == 2);
  CHECK(ranks[1].name == "rank 1");
  CHECK(std::filesystem::path(ranks[1].words[0]).filename() == "launch_test");
  CHECK(std::vector<std::string>(ranks[1].words.begin() + 1, ranks[1].words.end()) ==
        std::vector<std::string>{"train", "a.toml"});
  CHECK(ranks[0].shows_output);
  CHECK(!ranks[1].shows_output);
  const auto place = rank_place([&](const char* name) -> const char* {
    for (const auto& [own, value] : ranks[1].environment)
      if (own == name) return value.c_str();
    return nullptr;
  });
  REQUIRE(place);
  CHECK(place->rank == 1);
  CHECK(place->local_size == 2);
  CHECK(place->launch.size() == 16);
}
