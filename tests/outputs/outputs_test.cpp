// Outputs that fail while a run writes them: full, read-only, slow, vanishing, closed, or somebody else's. Training is
// never lost for a log or a console, what cannot be saved is one error with its path, and nothing hangs.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <filesystem>
#include <ostream>
#include <set>
#include <sstream>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "end_to_end.h"
#include "quern/error.h"
#include "run/assumed_gpu.h"

using namespace quern;
using namespace quern::testing;
namespace fs = std::filesystem;

namespace {

const Overrides kShort{"checkpoint.keep_last=0", "train.eval_every=0"};

/// A limit on file sizes stands for a full disk: writes fail in the same places.
auto files_up_to(rlim_t bytes) {
  return [bytes] {
    const rlimit limit{bytes, bytes};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  };
}

/// Root may write anywhere and has no limit on processes: another user then, for whom `files` are opened.
bool needs_other_user() { return ::geteuid() == 0; }
void become_other_user() {
  if (needs_other_user() && (::setgid(65534) != 0 || ::setuid(65534) != 0)) ::_exit(125);
}
void open_to_others(const TinyFiles& files) { fs::permissions(fs::path(files.config()).parent_path(), fs::perms::all); }
/// A directory that the program cannot write into.
std::string read_only(const TinyFiles& files, const std::string& name) {
  open_to_others(files);
  fs::create_directory(files.at(name));
  fs::permissions(files.at(name), fs::perms::owner_read | fs::perms::owner_exec | fs::perms::group_read |
                                      fs::perms::group_exec | fs::perms::others_read | fs::perms::others_exec);
  return files.at(name);
}

/// A pipe of one page without a reader, for the child's streams.
struct StalledPipe {
  int ends[2];
  StalledPipe() {
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    ::fcntl(ends[1], F_SETPIPE_SZ, 4096);
  }
  ~StalledPipe() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
  auto as_output() const {
    return [this] {
      ::dup2(ends[1], STDOUT_FILENO);
      ::dup2(ends[1], STDERR_FILENO);
    };
  }
};

/// The exit code, or -1 when the program is still there after 100 seconds: long enough for a busy machine.
int ends(Child& child) {
  for (int i = 0; i < 100000 && child.running(); ++i) ::usleep(1000);
  return child.running() ? -1 : child.wait();
}

bool await(Child& child, const std::string& run, std::size_t steps) {
  while (occurrences(read_text(run + "/log.jsonl"), "{\"event\":\"step\"") < steps) {
    if (!child.running()) return false;
    ::usleep(2000);
  }
  return true;
}

}  // namespace

// ---- somebody else's ----

TEST_CASE("a log, an export and figures replace only what quern wrote") {
  TinyFiles files;
  const std::string tokens = read_text(files.at("train.tok")), config = read_text(files.config());
  fs::create_symlink(files.at("train.tok"), files.at("link"));
  for (const std::string& path : {files.at("train.tok"), files.config(), files.at("link")}) {
    CAPTURE(path);
    check_fails(quern_train(files, {"log.jsonl.path=" + path}), 4,
                {path, "is there already and is not a log of quern", "log.jsonl.path"});
    check_fails(quern_run({"bench", files.config(), "--steps", "1", "--json", path}), 4,
                {path, "is there already and is not a file of quern bench", "--json"});
  }
  CHECK((read_text(files.at("train.tok")) == tokens));
  CHECK(read_text(files.config()) == config);
  CHECK(newest_step(files.at("run")) == -1);  // found before anything was trained

  REQUIRE(::mkfifo(files.at("fifo").c_str(), 0600) == 0);
  Child child(train_arguments(files, {"log.jsonl.path=" + files.at("fifo")}));
  CHECK(ends(child) == 4);
  CHECK(has(child.err(), "fifo: is there already and is not a log of quern: found no regular file"));
  for (int i = 0; i < 2; ++i)  // its own it replaces
    CHECK(quern_run({"bench", files.config(), "--steps", "1", "--json", files.at("figures.json")}).code == 0);
}

TEST_CASE("figures go to a pipe or a device as it takes them") {
  TinyFiles files;
  const std::string fifo = files.at("fifo");
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  Child bench({"bench", files.config(), "--steps", "1", "--json", fifo});
  const std::string figures = read_text(fifo);
  CHECK(ends(bench) == 0);
  CHECK(nlohmann::json::accept(figures));
  CHECK(fs::is_fifo(fifo));
  CHECK(quern_run({"plan", files.config(), "--write", "/dev/null"}).code == 0);
  CHECK(fs::is_character_file("/dev/null"));
  check_fails(quern_run({"plan", files.config(), "--write", "/dev/full"}), 4,
              {"/dev/full: cannot be written: found No space left on device"});
}

TEST_CASE("a table of plans has each line as soon as it is known") {
  struct Flushes : std::stringbuf {
    std::vector<std::string> texts;
    int sync() override { return texts.push_back(str()), 0; }
  } flushes;
  std::ostream out(&flushes);
  TinyFiles files;
  CHECK_THROWS_AS(write_fit_table(out, files.config(), {{}, {}, {"train.micro_batch=0"}}), Error);
  REQUIRE(flushes.texts.size() == 3);
  for (std::size_t lines = 1; lines <= 3; ++lines) {
    const std::string& text = flushes.texts[lines - 1];
    CHECK(static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')) == lines);
  }
}

// ---- closed ----

TEST_CASE("a program without standard streams writes into no file of its own") {
  for (bool all : {false, true}) {
    CAPTURE(all);
    TinyFiles files;
    const Outcome outcome = quern_run(train_arguments(files, kShort), [all] {
      ::close(STDOUT_FILENO);
      if (all) ::close(STDIN_FILENO), ::close(STDERR_FILENO);
    });
    CHECK(outcome.code == 4);  // said at the end: standard output cannot be written
    CHECK(newest_step(files.at("run")) == 8);
    CHECK(log_of(files.at("run")).back().at("event") == "end");
    const std::string lock = read_text(files.at("run") + "/.lock");
    CHECK(std::all_of(lock.begin(), lock.end(), [](unsigned char c) { return std::isdigit(c) || c == '\n'; }));
  }
}

// ---- slow ----

TEST_CASE("a reader that stalls holds up neither a run nor its end") {
  TinyFiles files;
  StalledPipe pipe;
  Child child(train_arguments(files, with(kShort, {"train.steps=300", "checkpoint.every=100", "log.every=1"})),
              pipe.as_output());
  CHECK(ends(child) == 0);
  CHECK(newest_step(files.at("run")) == 300);
  CHECK(events(files.at("run"), "end").size() == 1);
}

TEST_CASE("a signal saves and ends a run whose output has no reader") {
  for (int signal : {SIGTERM, SIGHUP}) {
    TinyFiles files;
    StalledPipe pipe;
    Child child(train_arguments(files, {"train.steps=1000000", "checkpoint.every=0", "log.every=1"}), pipe.as_output());
    REQUIRE(await(child, files.at("run"), 200));
    child.signal(signal);
    CHECK(ends(child) == 128 + signal);
    CHECK(newest_step(files.at("run")) == events(files.at("run"), "step").back().at("step"));
  }
}

TEST_CASE("a reader that stalls holds up neither a comparison nor its end, nor the signal that ends it") {
  TinyFiles files;
  const StalledPipe pipe;
  REQUIRE(::write(pipe.ends[1], std::string(4096, ' ').data(), 4096) == 4096);  // not a byte more is taken
  std::vector<std::string> words{"ab", files.config(), "--out", files.at("ab"), "--vary", "train.steps=2,3"};
  Child child(words, pipe.as_output());
  CHECK(ends(child) == 0);
  CHECK(has(read_text(files.at("ab") + "/report.md"), "train.steps=3"));

  words[3] = files.at("stopped");
  words.back() = "train.steps=1,1000000";
  Child stopped(words, pipe.as_output());
  REQUIRE(await(stopped, files.at("stopped") + "/2-train.steps=1000000/seed-1", 3));
  stopped.signal(SIGINT);
  CHECK(ends(stopped) == 128 + SIGINT);
}

TEST_CASE("a comparison whose reader goes away is made, and its output reported missing") {
  TinyFiles files;
  StalledPipe pipe;
  Child child({"ab", files.config(), "--out", files.at("ab"), "--vary", "train.steps=2,3"}, [&pipe] {
    ::dup2(pipe.ends[1], STDOUT_FILENO);
    ::close(pipe.ends[0]);
  });
  ::close(pipe.ends[0]);
  pipe.ends[0] = -1;
  CHECK(ends(child) == 4);
  CHECK(has(child.err(), "standard output: cannot be written"));
  CHECK(has(read_text(files.at("ab") + "/report.md"), "train.steps=3"));
}

// ---- full ----

TEST_CASE("a log whose disk is full costs events, and neither the run nor a bit of it") {
  for (const char* sinks : {"[\"console\", \"jsonl\"]", "[\"jsonl\"]"}) {
    CAPTURE(sinks);
    TinyFiles files;
    const Overrides common = with(kShort, {std::string("log.sinks=") + sinks});
    for (const char* name : {"straight", "run"})
      REQUIRE(quern_train(files, with(common, {files.run(name), "train.steps=3"})).code == 0);
    REQUIRE(quern_train(files, with(common, {files.run("straight")})).code == 0);
    const std::string run = files.at("run"), log = run + "/log.jsonl";
    std::string text = read_text(log);
    constexpr std::size_t kMost = 2000000;  // more than a checkpoint takes
    while (text.size() < kMost) text += "{\"event\":\"note\",\"text\":\"" + std::string(1000, 'x') + "\"}\n";
    text = text.substr(0, kMost);
    text.resize(text.rfind('\n') + 1);
    write_text(log, text);
    const Outcome outcome = quern_run(train_arguments(files, common), files_up_to(text.size()));
    CHECK(outcome.code == 0);
    const std::string said = outcome.out + outcome.err;
    CHECK(occurrences(said, "log sink \"jsonl\" fails, and the run continues without it: " + log +
                                ": the log cannot be written: found File too large") == 1);
    CHECK(occurrences(said, "events are missing") == 1);
    CHECK(has(std::string(sinks).size() > 10 ? outcome.out : outcome.err, "warning: log sink \"jsonl\": "));
    CHECK((read_text(log) == text));
    CHECK(newest_step(run) == 8);
    CHECK((newest_tensors(run) == newest_tensors(files.at("straight"))));
  }
}

TEST_CASE("a checkpoint, an export or a comparison without room is one error that names the path") {
  TinyFiles files;
  auto fails = [&](const std::vector<std::string>& words, rlim_t bytes, const char* path) {
    const Outcome outcome = quern_run(words, files_up_to(bytes));
    check_fails(outcome, 4, {path, "File too large"});
  };
  fails(train_arguments(files, kShort), 50000, "/run/checkpoints/");
  CHECK(newest_step(files.at("run")) == -1);
  const Overrides no_checkpoint{files.run("export"), "checkpoint.every=0", "checkpoint.at_end=false",
                                "train.eval_every=0"};
  fails(train_arguments(files, no_checkpoint), 50000, "/export/export/model.safetensors");
  CHECK_FALSE(fs::exists(files.at("export") + "/export"));
  fails({"ab", files.config(), "--out", files.at("ab"), "--vary", "train.seed=1,2"}, 100, "/ab/");
  fails({"bench", files.config(), "--steps", "1", "--json", files.at("figures.json")}, 100, "figures.json");
  CHECK_FALSE(fs::exists(files.at("figures.json")));
}

TEST_CASE("an arm whose log has no room is reported with that, and the others go on") {
  TinyFiles files;
  const Outcome outcome =
      quern_run({"ab", files.config(), "--out", files.at("ab"), "--vary", "train.steps=1,300"}, files_up_to(20000));
  CHECK(outcome.code == 4);
  CHECK(has(outcome.out, "FAILED: `train.steps=300`, seed 1"));
  CHECK(has(outcome.out, "it left no whole log.jsonl: "));
  CHECK(has(outcome.out, "events are missing"));
  CHECK_FALSE(has(outcome.out, "FAILED: `train.steps=1`"));
}

TEST_CASE("a console without room does not stop a run, and is said at its end") {
  TinyFiles files;
  const Outcome outcome = quern_run(train_arguments(files, kShort), [] {
    const int full = ::open("/dev/full", O_WRONLY);
    if (full >= 0) ::dup2(full, STDOUT_FILENO);
  });
  check_fails(outcome, 4, {"standard output: cannot be written"});
  CHECK(newest_step(files.at("run")) == 8);
  CHECK(events(files.at("run"), "end").size() == 1);
}

// ---- read-only ----

TEST_CASE("what cannot be written is found before anything is trained, and named") {
  TinyFiles files;
  const std::string place = read_only(files, "place");
  auto fails = [&](const std::vector<std::string>& words, const std::vector<std::string>& parts) {
    check_fails(quern_run(words, become_other_user), 4, with({"Permission denied"}, parts));
    CHECK(newest_step(files.at("run")) == -1);
  };
  fails(train_arguments(files, {"log.directory=" + place}), {place, "choose a directory"});
  fails(train_arguments(files, {"log.directory=" + place + "/run"}), {place});
  fails(train_arguments(files, {"log.jsonl.path=" + place + "/log.jsonl"}), {place, "choose another log.jsonl.path"});
  fails({"ab", files.config(), "--out", place, "--vary", "train.seed=1,2"}, {place});
  fails({"bench", files.config(), "--steps", "1", "--json", place + "/figures.json"}, {place});
}

// ---- vanishing ----

TEST_CASE("a log that is removed while a run writes it is begun anew") {
  TinyFiles files;
  const std::string run = files.at("run");
  Child child(train_arguments(files, {"train.steps=1000000", "checkpoint.every=0", "log.every=1000000"}));
  REQUIRE(await(child, run, 5));
  fs::remove(run + "/log.jsonl");
  REQUIRE(await(child, run, 5));
  child.signal(SIGTERM);
  CHECK(ends(child) == 143);
  CHECK(events(run, "step").front().at("step") > 5);
  CHECK(newest_step(run) == events(run, "step").back().at("step"));
}

TEST_CASE("a run or a comparison whose directory is removed ends with a code of the table") {
  TinyFiles files;
  const std::string run = files.at("run"), ab = files.at("ab");
  Child train(train_arguments(files, {"train.steps=2000", "checkpoint.every=100", "log.every=1000000"}));
  Child compare({"ab", files.config(), "--out", ab, "--vary", "train.steps=2000,2001"});
  REQUIRE(await(train, run, 5));
  REQUIRE(await(compare, ab + "/1-train.steps=2000/seed-1", 5));
  std::error_code raced;  // with files written meanwhile
  for (int i = 0; i < 100 && fs::exists(run) && fs::remove_all(run, raced) == 0; ++i) {
  }
  fs::remove_all(ab, raced);
  for (Child* child : {&train, &compare}) {
    const int code = ends(*child);
    CHECK((code == 0 || code == 4));
  }
}

// ---- no processes ----

TEST_CASE("a limit on processes and threads is a lack of resources, wherever it strikes") {
  std::set<int> codes;
  for (rlim_t most = 1; most < 12; ++most) {
    CAPTURE(most);
    TinyFiles files;
    open_to_others(files);
    const Outcome outcome = quern_run(train_arguments(files, with(kShort, {"device.cpu.threads=4"})), [most] {
      const rlimit limit{most, most};
      ::setrlimit(RLIMIT_NPROC, &limit);
      become_other_user();
    });
    CAPTURE(outcome.err);
    CHECK((outcome.code == 0 || outcome.code == 4));
    codes.insert(outcome.code);
    if (outcome.code == 4) CHECK(has(outcome.err, "ulimit -u"));
  }
  CHECK(codes.contains(4));
}

TEST_CASE("empty names of outputs are faults of the command") {
  TinyFiles files;
  check_fails(quern_train(files, {"log.directory=\"\""}), 2, {"log.directory: found \"\""});
  check_fails(quern_run({"ab", files.config(), "--out", "", "--vary", "train.seed=1,2"}), 2,
              {"--out: empty: found \"\""});
  check_fails(quern_run({"bench", files.config(), "--json", ""}), 2, {"--json: empty: found \"\""});
}

TEST_CASE("unexpected values in a comparison's files make it run again, and seeds do not wrap") {
  TinyFiles files;
  const std::vector<std::string> words{"ab",     files.config(),          "--out",   files.at("ab"),
                                       "--vary", "train.micro_batch=1,2", "--steps", "1"};
  REQUIRE(quern_run(words).code == 0);
  for (const char* text :
       {"{\"seconds\":\"1\",\"peak_host_bytes\":1}", "{\"seconds\":1,\"peak_host_bytes\":[]}", "{}"}) {
    CAPTURE(text);
    write_text(files.at("ab") + "/1-train.micro_batch=1/seed-1/run.json", text);
    const Outcome outcome = quern_run(words);
    CHECK(outcome.code == 0);
    CHECK(has(outcome.out, "1/2"));
    CHECK(has(outcome.out, "1 runs were there already"));
  }
  check_fails(quern_run({"ab", files.config(), "--out", files.at("other"), "--vary", "train.micro_batch=1,2",
                         "--repeat", "2", "--set", "train.seed=9223372036854775807"}),
              2, {"train.seed", "too large for 2 repeats", "at most 9223372036854775806"});
  CHECK_FALSE(fs::exists(files.at("other")));
}
