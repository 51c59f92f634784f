// Ranks that stop, die, fail or are slow, at every stage of a run: all processes leave in time, with the right code,
// and say which rank it was. Nobody starts the ranks here who would see to that.
#include <linux/close_range.h>
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <regex>
#include <thread>

#include <doctest/doctest.h>

#include "data/tokens/token_file.h"
#include "rank_group.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCulprit = 1;
constexpr double kTimeout = 5, kMore = 25;  // s: a busy machine

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }
void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

Overrides endless(const TinyFiles& files) {
  return with(of_ranks(3, "ranks"),
              {"train.accumulation=3", "train.steps=100000", "train.eval_every=0", "checkpoint.every=0",
               "parallel.timeout=" + std::to_string(kTimeout), files.run("run")});
}

/// A stage of a run: what it needs in the config, and whether it is reached.
struct Stage {
  const char* name;
  bool trains;
  Overrides overrides;
  std::function<bool(const TinyFiles&)> reached;
};

/// Much more to evaluate than to train on, so that a run takes long to end.
void lengthen_end(const TinyFiles& files) {
  TokenFileContent content{
      .tokens = std::vector<std::int32_t>(200001, 7), .mask = {}, .vocabulary = 64, .separator = -1};
  write_token_file(files.at("validation.tok"), content);
}

/// In a child, instead of quern: mpirun with so many.
void become_mpirun(int size, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"mpirun", "-n", std::to_string(size), "--allow-run-as-root", "--oversubscribe",
                                       "--mca", "plm", "isolated", QUERN_BUILD_DIR "/bin/quern"});
  std::vector<char*> words;
  for (std::string& argument : arguments) words.push_back(argument.data());
  words.push_back(nullptr);
  ::execvp(words[0], words.data());
}

std::vector<Stage> stages() {
  auto steps = [](const TinyFiles& files) { return events(files.at("run"), "step").size() >= 3; };
  return {{"at the start", false, {}, [](const TinyFiles&) { return true; }},
          {"while they connect",
           false,
           {},
           [](const TinyFiles& files) { return !std::filesystem::is_empty(files.at("tmp")); }},
          {"in a step", true, {}, steps},
          {"in a save",
           true,
           {"checkpoint.every=1"},
           [](const TinyFiles& files) {
             return std::filesystem::exists(files.at("run")) && newest_step(files.at("run")) >= 2;
           }},
          {"at the end", true, {"train.steps=3"}, steps}};
}

/// Whether it names the rank, alone or in a list of those that did not come.
bool names(const std::string& text, int rank) {
  return std::regex_search(text, std::regex("(rank |within 5.0s: )([0-9]+, )*" + std::to_string(rank) + "\\b"));
}

/// Three ranks, of which `culprit` gets the signal at that stage, and then leaves with this code.
void check_all_leave(const Stage& stage, int culprit, int signal, int code) {
  CAPTURE(stage.name);
  TinyFiles files;
  lengthen_end(files);
  std::filesystem::create_directory(files.at("tmp"));  // where ranks that connect have a folder
  Group group(3, files, with(endless(files), stage.overrides), {},
              [&](int) { ::setenv("TMPDIR", files.at("tmp").c_str(), 1); });
  while (group.running() && !stage.reached(files)) sleep(0.001);
  REQUIRE(group.running());
  const auto begin = Clock::now();
  group[culprit].signal(signal);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == culprit) continue;
    CAPTURE(rank);
    CHECK(group[rank].wait() == 6);
    const std::string err = group[rank].err();
    CAPTURE(err);
    CHECK(occurrences(err, "quern: error: ") == 1);
    CHECK(names(err, culprit));
    const bool says = has(err, " starts again\n") || has(err, " continues from there\n");
    if (stage.trains) CHECK(says == (rank == (culprit == 0 ? 1 : 0)));  // once, by the first rank that is left
  }
  CHECK(since(begin) < kTimeout + kMore);
  if (signal == SIGSTOP) group[culprit].signal(SIGCONT);
  CHECK(group[culprit].wait() == code);
}

}  // namespace

TEST_CASE("a rank that is stopped") {
  for (const Stage& stage : stages()) check_all_leave(stage, kCulprit, SIGSTOP, 6);
}

TEST_CASE("rank 0, when it is stopped") {
  for (const Stage& stage : stages()) check_all_leave(stage, 0, SIGSTOP, 6);
}

TEST_CASE("rank 0, when it is stopped while it reads the checkpoint that a run goes on from") {
  TinyFiles files;
  const Overrides large = with(endless(files), {"model.llama.vocab_size=200000", "checkpoint.every=1"});  // 150 MB
  CHECK(Group(3, files, with(large, {"train.steps=1"})).wait() == std::vector<int>(3, 0));
  Group group(3, files, large);
  const std::string opened = "/proc/" + std::to_string(group[0].process()) + "/fd";
  auto reads = [&] {
    std::error_code gone;  // a descriptor that was closed meanwhile
    for (const auto& entry : std::filesystem::directory_iterator(opened, gone))
      if (has(std::filesystem::read_symlink(entry, gone).string(), "-of-00003.safetensors")) return true;
    return false;
  };
  while (group.running() && !reads()) sleep(0.001);
  const auto begin = Clock::now();
  group[0].signal(SIGSTOP);
  for (const int rank : {1, 2}) {
    CHECK(group[rank].wait() == 6);
    CHECK(has(group[rank].err(), "hang: rank 0 has sent nothing for "));
  }
  CHECK(since(begin) < kTimeout + kMore);
  group[0].signal(SIGCONT);
  CHECK(group[0].wait() == 6);
}

TEST_CASE("ranks that are all stopped, anywhere in a step or between hosts, go on") {
  TinyFiles calm, disturbed;
  for (TinyFiles* files : {&calm, &disturbed}) {
    Group group(3, *files, with(endless(*files), {"train.steps=60", "train.eval_every=2", "parallel.timeout=3"}));
    if (files == &disturbed) {
      sleep(0.4);
      for (int rank = 0; rank < 3; ++rank) group[rank].signal(SIGSTOP);
      sleep(6.0);
      for (int rank = 0; rank < 3; ++rank) group[rank].signal(SIGCONT);
    }
    CHECK(group.wait() == group.all(0));
  }
  CHECK(logged_losses(disturbed.at("run")) == logged_losses(calm.at("run")));
}

TEST_CASE("a rank that is killed") {
  for (const Stage& stage : stages()) check_all_leave(stage, kCulprit, SIGKILL, -SIGKILL);
}

TEST_CASE("a rank that hangs in a step is named with the collective, and every rank leaves a report") {
  TinyFiles files;
  Group group(3, files, with(endless(files), {"train.accumulation=900"}));  // hardly ever between steps
  while (group.running() && events(files.at("run"), "step").size() < 3) sleep(0.001);
  sleep(0.02);
  group[kCulprit].signal(SIGSTOP);
  for (const int rank : {0, 2}) {
    CHECK(group[rank].wait() == 6);
    const std::string err = group[rank].err();
    CAPTURE(err);
    CHECK(has(err, "hang: rank "));
    CHECK(has(err, "; rank 1 has not reached it: its last message, "));
    const std::string report = read_text(files.at("run/hang.rank" + std::to_string(rank) + ".txt"));
    CAPTURE(report);
    CHECK(has(report, "hang: rank "));
    CHECK(has(report, "\nin "));
    CHECK(has(report, "micro-step"));
    CHECK(has(report, "  in    "));
  }
  group[kCulprit].signal(SIGCONT);
  CHECK(group[kCulprit].wait() == 6);
}

// mpirun ends its ranks by itself when one fails: each may say so, and the code is mpirun's.
TEST_CASE("a rank that is stopped or killed is named, and no process is left, whoever started them") {
  struct Case {
    std::string communicator, starter;
  };
  for (const Case& c : {Case{"memcpy", "quern"}, Case{"mpi", "quern"}, Case{"mpi", "mpirun"}})
    for (const int signal : {SIGSTOP, SIGKILL}) {
      if (c.communicator == "mpi" && !has_mpi()) return;
      const bool by_quern = c.starter == "quern";
      CAPTURE(c.communicator);
      CAPTURE(c.starter);
      CAPTURE(signal);
      TinyFiles files;
      const std::vector<std::string> arguments =
          train_arguments(files, with(endless(files), {"parallel.communicator=" + c.communicator}));
      Child starter(arguments, [&] {
        if (!by_quern) become_mpirun(3, arguments);
      });
      while (starter.running() && events(files.at("run"), "step").size() < 3) sleep(0.001);
      const std::vector<pid_t> processes = descendants(starter.process());
      const pid_t culprit = rank_among(processes, kCulprit);
      if (culprit == 0) FAIL("no rank " << kCulprit << "; code " << starter.wait() << ": " << starter.err());
      const auto begin = Clock::now();
      ::kill(culprit, signal);
      const int code = starter.wait();
      CAPTURE(starter.err());
      CHECK(since(begin) < kTimeout + kMore);
      CHECK(has(starter.err(), "rank " + std::to_string(kCulprit)));
      CHECK_FALSE(has(starter.out(), "\x1b"));
      if (by_quern) {
        CHECK(code == 6);
        CHECK(occurrences(starter.err(), "\n") == 1);
        CHECK(occurrences(starter.err(), "quern: error: ") == 1);
        CHECK(has(starter.err(), "; no step is saved in " + files.at("run") + ", and the same command starts again\n"));
      } else {
        CHECK(code != 0);
      }
      for (const pid_t process : processes) {
        for (int wait = 0; !by_quern && wait < 100 && runs(process); ++wait) sleep(0.05);
        CHECK_FALSE(runs(process));
      }
    }
}

TEST_CASE("rank 0 that is killed while ranks connect leaves no folder where quern started it") {
  TinyFiles files;
  std::filesystem::create_directory(files.at("tmp"));
  Child starter(train_arguments(files, endless(files)), [&] { ::setenv("TMPDIR", files.at("tmp").c_str(), 1); });
  pid_t zero = 0;
  while (starter.running() && std::filesystem::is_empty(files.at("tmp")))
    if (zero == 0) zero = rank_among(descendants(starter.process()), 0);
  REQUIRE(zero > 0);
  ::kill(zero, SIGKILL);
  CHECK(starter.wait() == 6);
  CHECK(has(starter.err(), "rank 0"));
  CHECK(std::filesystem::is_empty(files.at("tmp")));
}

TEST_CASE("a rank that fails, at the start or in a save") {
  auto limit = [](int resource, rlim_t value) {
    const rlimit most{value, value};
    ::setrlimit(static_cast<__rlimit_resource>(resource), &most);
  };
  struct Case {
    int rank, resource;
    rlim_t value;
  };
  for (const Case& c : {Case{kCulprit, RLIMIT_AS, rlim_t{300} << 20}, Case{0, RLIMIT_FSIZE, 20000},
                        Case{kCulprit, RLIMIT_FSIZE, 20000}}) {
    CAPTURE(c.rank);
    TinyFiles files;
    Group group(3, files, with(endless(files), {"checkpoint.every=5"}), {}, [&](int rank) {
      if (rank == c.rank) limit(c.resource, c.value);
    });
    for (int rank = 0; rank < 3; ++rank) {
      const int code = group[rank].wait();
      CAPTURE(rank);
      CAPTURE(group[rank].err());
      CHECK(code == (rank == c.rank ? 4 : 6));
      CHECK(occurrences(group[rank].err(), "quern: error: ") == 1);
      if (rank == c.rank) continue;
      CHECK(has(group[rank].err(), "rank " + std::to_string(c.rank)));
      CHECK_FALSE(has(group[rank].err(), "ended with an error"));
    }
  }
}

TEST_CASE("a rank with too few descriptors says so, wherever it needs one more") {
  for (const int limited : {0, 1}) {
    bool enough = false;
    for (rlim_t most = 6; !enough; ++most) {  // the system's loader needs as many
      CAPTURE(limited);
      CAPTURE(most);
      TinyFiles files;
      Group group(2, files, with(endless(files), {"parallel.ranks=2", "train.steps=2", "parallel.timeout=1.5"}), {},
                  [&](int rank) {
                    const rlimit open{most, most};
                    if (rank != limited) return;
                    ::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);  // inherited ones
                    ::setrlimit(RLIMIT_NOFILE, &open);
                  });
      const std::vector<int> codes = group.wait();
      const std::string err = group[limited].err();
      CAPTURE(err);
      enough = codes == group.all(0);
      if (enough) break;
      CHECK(codes[static_cast<std::size_t>(limited)] == 4);
      CHECK(has(err, "Too many open files"));
      REQUIRE(most < 60);
    }
  }
}

TEST_CASE("ranks that MPI ends leave with 6 and its words, and a stop while mpirun starts leaves nothing of it") {
  if (!has_mpi()) return;
  TinyFiles files;
  const auto arguments =
      train_arguments(files, with(endless(files), {"parallel.communicator=mpi", "parallel.timeout=60"}));
  // A rank sends MPI's words to mpirun while it ends: now and then they do not arrive there.
  bool has_words = false;
  for (int i = 0; i < 3 && !has_words; ++i) {
    const Outcome ended = quern_run(arguments, [] { ::setenv("OMPI_MCA_pml", "nonsense", 1); });
    CAPTURE(ended.err);
    CHECK(ended.code == 6);
    CHECK(has(ended.err, "quern: error: rank "));
    CHECK(has(ended.err, " was ended by a library that it uses"));
    has_words = has(ended.err, "Component: nonsense");
  }
  CHECK(has_words);
  const std::string programs = files.at("programs"), tmp = files.at("tmp"), begun = files.at("begun");
  for (const std::string& folder : {programs, tmp}) std::filesystem::create_directory(folder);
  write_text(programs + "/mpirun", "#!/bin/sh\necho >" + begun + "\nexec sleep 60\n");
  std::filesystem::permissions(programs + "/mpirun", std::filesystem::perms::owner_all);
  Child starter(arguments, [&] {
    ::setenv("PATH", (programs + ":" + std::getenv("PATH")).c_str(), 1);
    ::setenv("TMPDIR", tmp.c_str(), 1);
  });
  while (starter.running() && !std::filesystem::exists(begun)) sleep(0.001);
  const std::vector<pid_t> processes = descendants(starter.process());
  starter.signal(SIGTERM);
  CHECK(starter.wait() == 128 + SIGTERM);
  CHECK(std::filesystem::is_empty(tmp));
  for (const pid_t process : processes) CHECK_FALSE(runs(process));
}

TEST_CASE("a config that comes through a pipe is refused with several ranks, since each has to read it") {
  TinyFiles files;
  const Outcome outcome = quern_run({"sh"}, [&] {
    const std::string quern = QUERN_BUILD_DIR
        "/bin/quern train /dev/stdin --set parallel.ranks=2 --set "
        "parallel.communicator=memcpy --set train.accumulation=2";
    ::execlp("sh", "sh", "-c", ("cat " + files.config() + " | " + quern).c_str(), nullptr);
  });
  check_fails(outcome, 2, {"nothing started these ranks", "a file as its config, not a pipe"});
}

TEST_CASE("a rank that is slow within the time-out changes nothing") {
  TinyFiles calm, disturbed;
  for (TinyFiles* files : {&calm, &disturbed}) {
    Group group(2, *files,
                with(with(endless(*files), of_ranks(2, "ranks")),
                     {"train.steps=40", "checkpoint.every=7", "parallel.timeout=60"}));
    for (int pause = 0; files == &disturbed && pause < 4 && group.running(); ++pause) {
      sleep(0.2);
      group[pause % 2].signal(SIGSTOP);
      sleep(0.3);
      group[pause % 2].signal(SIGCONT);
    }
    CHECK(group.wait() == group.all(0));
  }
  CHECK(logged_losses(disturbed.at("run")) == logged_losses(calm.at("run")));
  for (const auto& step : events(disturbed.at("run"), "step")) {
    const auto slowest = step["slowest_rank"].get<int>();
    CHECK(step["waited"] == step["waited_" + std::to_string(slowest)]);
    for (const std::string rank : {"0", "1"}) {
      CHECK(step["seconds_" + rank].get<double>() > 0);
      CHECK(step["waited_" + rank].get<double>() >= step["waited"].get<double>());
    }
  }
  CHECK(newest_tensors(disturbed.at("run")) == newest_tensors(calm.at("run")));
}
