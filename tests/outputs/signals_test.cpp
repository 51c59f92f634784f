// Signals to a run: which of them save, stop or do nothing, and that after any of them, at any moment, the same command
// ends with the bits of a run that none reached. QUERN_SWEEP=N sends N times as many as a plain test, from
// QUERN_SWEEP_SEED on.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <set>

#include <doctest/doctest.h>

#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;
namespace fs = std::filesystem;

namespace {

const Overrides kEndless{"train.steps=1000000", "checkpoint.every=0", "log.every=1000000"};

/// Waits until `count` events of the kind are logged; false when the child ends before.
bool await(Child& child, const std::string& run, const std::string& kind, std::size_t count) {
  const std::string mark = "{\"event\":\"" + kind + "\"";
  while (occurrences(read_text(run + "/log.jsonl"), mark) < count) {
    if (!child.running()) return false;
    ::usleep(2000);
  }
  return true;
}

std::int64_t last_step(const std::string& run) {
  const auto steps = events(run, "step");
  return steps.empty() ? -1 : steps.back().at("step").get<std::int64_t>();
}

std::int64_t from_environment(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

}  // namespace

TEST_CASE("signals that stop a run save it first, and the shell's and the system's come more than once") {
  for (int signal : {SIGHUP, SIGXCPU}) {
    CAPTURE(signal);
    TinyFiles files;
    const std::string run = files.at("run");
    Child child(train_arguments(files, kEndless));
    REQUIRE(await(child, run, "step", 3));
    for (int i = 0; i < 20; ++i) child.signal(signal);
    CHECK(child.wait() == 128 + signal);
    CHECK(newest_step(run) >= 3);
    CHECK(newest_step(run) == last_step(run));
    CHECK(child.err() == "");
  }
}

TEST_CASE("a crash's signal that another process sent is no plugin's fault") {
  for (int signal : {SIGSEGV, SIGABRT}) {
    CAPTURE(signal);
    TinyFiles files;
    Child child(train_arguments(files, kEndless));
    REQUIRE(await(child, files.at("run"), "step", 1));
    child.signal(signal);
    CHECK(child.wait() == -signal);
    CHECK(child.err() == "quern: error: ended by signal " + std::to_string(signal) + " (" + ::sigdescr_np(signal) +
                             "), which process " + std::to_string(::getpid()) + " sent\n");
  }
}

TEST_CASE("a limit on processor time saves the run") {
  TinyFiles files;
  Child child(train_arguments(files, kEndless), [] {
    const rlimit seconds{1, 60};
    ::setrlimit(RLIMIT_CPU, &seconds);
  });
  CHECK(child.wait() == 128 + SIGXCPU);
  CHECK(newest_step(files.at("run")) >= 1);
  CHECK(newest_step(files.at("run")) == last_step(files.at("run")));
}

TEST_CASE("under nohup a dropped terminal stops nothing, and what stops a comparison then is asked for") {
  TinyFiles files;
  const std::string run = files.at("run"), ab = files.at("ab");
  auto nohup = [] { ::signal(SIGHUP, SIG_IGN); };
  Child train(train_arguments(files, kEndless), nohup);
  Child compare({"ab", files.config(), "--out", ab, "--vary", "train.steps=3,1000000"}, nohup);
  REQUIRE(await(train, run, "step", 3));
  REQUIRE(await(compare, ab + "/2-train.steps=1000000/seed-1", "step", 1));
  for (Child* child : {&train, &compare}) child->signal(SIGHUP);
  REQUIRE(await(train, run, "step", events(run, "step").size() + 20));
  const std::string second = ab + "/2-train.steps=1000000/seed-1";
  REQUIRE(await(compare, second, "step", events(second, "step").size() + 20));
  for (Child* child : {&train, &compare}) {
    child->signal(SIGTERM);
    CHECK(child->wait() == 143);
  }
  CHECK(newest_step(run) == last_step(run));
}

TEST_CASE("a comparison stops for SIGHUP and SIGXCPU with their exit codes, and SIGUSR1 does not disturb it") {
  for (int signal : {SIGHUP, SIGXCPU}) {
    CAPTURE(signal);
    TinyFiles files;
    const std::string ab = files.at("ab"), second = ab + "/2-train.steps=1000000/seed-1";
    Child compare({"ab", files.config(), "--out", ab, "--vary", "train.steps=2,1000000"});
    REQUIRE(await(compare, second, "step", 1));
    compare.signal(SIGUSR1);
    REQUIRE(await(compare, second, "step", events(second, "step").size() + 20));
    compare.signal(signal);
    CHECK(compare.wait() == 128 + signal);
    CHECK(has(compare.out(), "the same command continues"));
  }
}

TEST_CASE("SIGUSR1 saves, and the run goes on to the same bits") {
  TinyFiles files;
  const std::string run = files.at("run");
  Overrides common{"checkpoint.every=0", "checkpoint.keep_last=0", "checkpoint.export=false", "train.steps=1000"};
  Overrides straight = common;
  straight.push_back(files.run("straight"));
  REQUIRE(quern_train(files, straight).code == 0);
  Child child(train_arguments(files, common));
  for (std::size_t saved = 0; saved < 3; ++saved) {
    REQUIRE(await(child, run, "step", 20 * (saved + 1)));
    child.signal(SIGUSR1);
    if (!await(child, run, "checkpoint", saved + 1)) break;
  }
  CHECK(child.wait() == 0);
  CHECK(newest_tensors(run) == newest_tensors(files.at("straight")));
  CHECK(logged_losses(run) == logged_losses(files.at("straight")));
  const auto saved = events(run, "checkpoint");
  REQUIRE(saved.size() >= 2);  // the last is the end's; on a busy machine the run may be over before the third
  // Each is a state to go on from.
  for (const auto& event : saved) {
    const std::string name = "from" + event.at("step").dump();
    fs::create_directories(files.at(name) + "/checkpoints");
    const fs::path path = event.at("path").get<std::string>();
    fs::copy(path, fs::path(files.at(name)) / "checkpoints" / path.filename(), fs::copy_options::recursive);
    Overrides again = common;
    again.push_back(files.run(name));
    CHECK(quern_train(files, again).code == 0);
    CHECK(newest_tensors(files.at(name)) == newest_tensors(files.at("straight")));
  }
}

TEST_CASE("any signal at any moment, and the same command, end with the bits of a run that none reached") {
  TinyFiles files;
  const std::string run = files.at("run");
  // Everything that a run does between steps; so many steps that most of its time is in them.
  const Overrides common{"train.steps=120",        "checkpoint.every=25", "train.eval_every=10", "sample.every=15",
                         "sample.prompts=\"1,2\"", "sample.max_tokens=4", "precision.id=fp32",   "log.every=1000"};
  Overrides straight = common;
  straight.push_back(files.run("straight"));
  const auto begin = std::chrono::steady_clock::now();
  REQUIRE(quern_train(files, straight).code == 0);
  const double duration = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const std::string want = newest_tensors(files.at("straight")),
                    weights = read_text(files.at("straight") + "/export/model.safetensors");
  const Losses losses = logged_losses(files.at("straight"));

  const std::set<int> saves_and_stops{SIGHUP, SIGINT, SIGTERM, SIGXCPU};
  const std::set<int> goes_on{SIGUSR1, SIGPIPE, SIGXFSZ, SIGCHLD, SIGCONT, SIGURG, SIGWINCH};
  std::vector<int> signals;
  for (int signal = 1; signal < SIGRTMAX; signal += signal < 31 ? 1 : 11)
    if (signal != SIGKILL && signal != SIGSTOP && signal != 32 && signal != 33) signals.push_back(signal);
  for (int handled : {SIGHUP, SIGINT, SIGTERM, SIGXCPU, SIGUSR1}) signals.insert(signals.end(), 2, handled);
  const std::int64_t seed = from_environment("QUERN_SWEEP_SEED", 1);
  MESSAGE("QUERN_SWEEP_SEED=" << seed);
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  auto uniform = [&](double most) { return std::uniform_real_distribution<double>(0, most)(random); };
  std::map<int, int> codes;
  const std::int64_t rounds = static_cast<std::int64_t>(signals.size()) * from_environment("QUERN_SWEEP", 1);
  for (std::int64_t round = 0; round < rounds; ++round) {
    const int signal = signals[static_cast<std::size_t>(round) % signals.size()];
    const double moment = uniform(duration), again = uniform(1) < 0.3 ? uniform(0.02) : -1;
    CAPTURE(round);
    CAPTURE(signal);
    CAPTURE(moment);
    CAPTURE(again);
    fs::remove_all(run);
    Child child(train_arguments(files, common), [] {
      const rlimit none{0, 0};
      ::setrlimit(RLIMIT_CORE, &none);
      for (int ignored : {SIGINT, SIGQUIT, SIGHUP}) ::signal(ignored, SIG_DFL);  // as a shell's job may have them
    });
    ::usleep(static_cast<useconds_t>(moment * 1e6));
    child.signal(signal);
    if (again >= 0) {
      ::usleep(static_cast<useconds_t>(again * 1e6));
      child.signal(signal);
    }
    ::usleep(1000);
    child.signal(SIGCONT);
    const int code = child.wait();
    ++codes[code];
    CAPTURE(code);
    CAPTURE(child.err());
    const bool stops_process = signal == SIGTSTP || signal == SIGTTIN || signal == SIGTTOU;
    // Before main() a signal still has the system's effect.
    CHECK((code == 0 || code == -signal || (code == 128 + signal && saves_and_stops.contains(signal))));
    if (stops_process || signal == SIGCHLD || signal == SIGCONT || signal == SIGURG || signal == SIGWINCH)
      CHECK(code == 0);
    const std::int64_t done = fs::exists(run + "/log.jsonl") ? last_step(run) : -1;
    const bool insists = again >= 0 && (signal == SIGINT || signal == SIGTERM);
    if (code == 128 + signal && !insists && done >= 0) CHECK(newest_step(run) == done);
    if (goes_on.contains(signal) && done >= 0) CHECK(code == 0);
    if (saves_and_stops.contains(signal) && done >= 0) CHECK(code >= 0);
    Outcome outcome = quern_train(files, common);
    CAPTURE(outcome.err);
    CHECK(outcome.code == 0);
    CHECK((newest_tensors(run) == want));
    CHECK((logged_losses(run) == losses));
    CHECK((read_text(run + "/export/model.safetensors") == weights));
  }
  std::string seen;
  for (const auto& [code, count] : codes) seen += " " + std::to_string(code) + " (" + std::to_string(count) + ")";
  MESSAGE(rounds << " signals; exit codes, or minus the signal that ended it:" << seen);
}
