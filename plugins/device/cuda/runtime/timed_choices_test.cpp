// Choices as text and in a file; no GPU is needed.
#include "runtime/timed_choices.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <vector>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "products/library/matmul_plan.h"

using namespace quern::cuda;
namespace fs = std::filesystem;

TEST_CASE("an algorithm survives as text") {
  cublasLtMatmulAlgo_t algorithm;
  for (std::size_t i = 0; i < sizeof algorithm; ++i)
    reinterpret_cast<std::uint8_t*>(&algorithm)[i] = static_cast<std::uint8_t>(37 * i);
  const std::string text = text_of(algorithm);
  std::optional<cublasLtMatmulAlgo_t> found = algorithm_of(text);
  REQUIRE(found.has_value());
  CHECK(std::memcmp(&*found, &algorithm, sizeof algorithm) == 0);
  CHECK_FALSE(algorithm_of(text + "0"));
  CHECK_FALSE(algorithm_of("z" + text.substr(1)));
}

namespace {

TimedChoices::Usable any() {
  return [](const std::string&) { return true; };
}

std::optional<std::string> known(TimedChoices& choices, const std::string& what, const std::string& mark = {}) {
  return choices.known(what, mark, any());
}

/// Times `what`, unless it is known.
std::string timed(TimedChoices& choices, const std::string& what, const std::string& finding, bool lasting = true,
                  const std::string& mark = {}) {
  auto found = [&] { return TimedChoices::Found{finding, lasting}; };
  return *choices.known_or_timed(what, mark, any(), found);
}

/// A place for a cache file, in a directory that is not there yet.
struct Folder : quern::TestDirectory {
  std::string file() const { return *this / "below/cuda.json"; }
  std::string read() const { return quern::read_text(file()); }
  void write(const std::string& text) const {
    fs::create_directories(*this / "below");
    quern::write_text(file(), text);
  }
};

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  REQUIRE(text.find(from) != std::string::npos);
  return text.replace(text.find(from), from.size(), to);
}

/// Runs `body(i)` in `count` processes at once, each waiting for the others to be there.
void in_processes(int count, const std::function<void(int)>& body) {
  int gate[2];
  REQUIRE(pipe(gate) == 0);
  std::vector<pid_t> children;
  for (int i = 0; i < count; ++i) {
    children.push_back(fork());
    REQUIRE(children.back() >= 0);
    if (children.back() > 0) continue;
    close(gate[1]);
    char byte;
    while (read(gate[0], &byte, 1) > 0) continue;  // until the parent closes it
    body(i);
    _exit(0);
  }
  close(gate[0]);
  close(gate[1]);
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  }
}

}  // namespace

TEST_CASE("choices that a run took survive as text, for one GPU") {
  TimedChoices choices("GPU", ""), same("GPU", ""), other("another GPU", "");
  choices.take("a matmul", "its algorithm");
  choices.load(R"({"another GPU": {"x": "y"}})");
  same.load(choices.save());
  other.load(choices.save());
  CHECK(same.taken("a matmul") == "its algorithm");
  CHECK_FALSE(other.taken("a matmul"));
  CHECK(same.save() == choices.save());
  CHECK(other.save() != choices.save());
  for (const char* text : {"", "{", "[]", "{\"x\": 1}", "null"}) CHECK_NOTHROW(choices.load(text));
  CHECK(choices.save() == same.save());
}

TEST_CASE("a loaded choice that cannot be used is replaced, and what is saved says so") {
  TimedChoices choices("GPU", "");
  choices.take("a matmul", "old");
  const std::string before = choices.save();
  auto usable = [](const std::string& choice) { return choice != "old"; };
  CHECK_FALSE(choices.known("a matmul", "", usable));
  CHECK(choices.known_or_timed("a matmul", "", usable, [] { return TimedChoices::Found{"new", true}; }) == "new");
  CHECK(choices.save() != before);
  CHECK(choices.taken("a matmul") == "new");
  CHECK_FALSE(choices.known_or_timed("another", "", usable, [] { return std::optional<TimedChoices::Found>(); }));
}

TEST_CASE("kinds of search have choices of their own in the file, but a run keeps what it took") {
  Folder folder;
  TimedChoices run("GPU", folder.file());
  timed(run, "a matmul", "of the list");
  TimedChoices other("GPU", folder.file());
  CHECK_FALSE(known(other, "a matmul", ", wide"));
  timed(other, "a matmul", "of all", true, ", wide");
  CHECK(known(other, "a matmul") == "of all");
  TimedChoices listed("GPU", folder.file()), wide("GPU", folder.file()), loaded("GPU", folder.file());
  CHECK(known(listed, "a matmul") == "of the list");
  CHECK(known(wide, "a matmul", ", wide") == "of all");
  loaded.load(run.save());
  CHECK(known(loaded, "a matmul", ", wide") == "of the list");
}

TEST_CASE("timed choices outlive the process in a file, beside other GPUs' choices") {
  Folder folder;
  TimedChoices one("GPU", folder.file()), two("GPU 2", folder.file());
  CHECK(timed(one, "attention", "16 0 plan") == "16 0 plan");
  one.take("a guess", "not kept");
  timed(two, "attention", "8 1 plan");
  TimedChoices again("GPU", folder.file()), again_two("GPU 2", folder.file());
  CHECK(again.save() == TimedChoices("GPU", "").save());  // known, not taken
  CHECK_FALSE(known(again, "a guess"));
  CHECK(known(again, "attention") == "16 0 plan");
  CHECK(known(again_two, "attention") == "8 1 plan");
  // What others found meanwhile is taken; what came from a checkpoint does not go to the file.
  TimedChoices early("GPU", folder.file());
  timed(again, "matmul", "its algorithm");
  CHECK(timed(early, "matmul", "a later one") == "its algorithm");
  early.take("loss", "of a checkpoint");
  CHECK(timed(early, "loss", "timed") == "of a checkpoint");
  TimedChoices last("GPU", folder.file());
  CHECK_FALSE(known(last, "loss"));
}

TEST_CASE("a choice timed at other sizes is of its run only") {
  Folder folder;
  TimedChoices busy("GPU", folder.file());
  CHECK(timed(busy, "a matmul", "of a half", false) == "of a half");
  CHECK(timed(busy, "a matmul", "another") == "of a half");
  TimedChoices next("GPU", folder.file());
  CHECK(timed(next, "a matmul", "of the whole") == "of the whole");
}

TEST_CASE("damaged entries are passed over, files of no or an earlier schema are replaced, later ones stay") {
  Folder folder;
  {
    TimedChoices choices("GPU", folder.file());
    timed(choices, "a", "choice of a");
    timed(choices, "b", "choice of b");
  }
  const std::string whole = folder.read();
  folder.write(replaced(whole, "choice of a", "choice of c"));  // as by a bit, or by hand
  TimedChoices damaged("GPU", folder.file());
  CHECK_FALSE(known(damaged, "a"));
  CHECK(known(damaged, "b") == "choice of b");
  for (const std::string& bad :
       {std::string("{ broken"), std::string(), std::string("[]"), replaced(whole, "\"schema\": 2", "\"schema\": 1"),
        std::string(R"({"GPU": {"a": "as before there was a schema"}})"), std::string(R"({"schema": 2, "choices": 7})"),
        std::string(R"({"schema": 2, "choices": {"GPU": [], "x": {"a": 1, "b": ["c"], "d": [1, 2]}}})")}) {
    CAPTURE(bad);
    folder.write(bad);
    TimedChoices choices("GPU", folder.file());
    CHECK_FALSE(known(choices, "a"));
    CHECK(timed(choices, "a", "anew") == "anew");
    TimedChoices next("GPU", folder.file());
    CHECK(known(next, "a") == "anew");
  }
  const std::string later = replaced(whole, "\"schema\": 2", "\"schema\": 3");
  folder.write(later);
  TimedChoices choices("GPU", folder.file());
  CHECK_FALSE(known(choices, "a"));
  CHECK(timed(choices, "a", "anew") == "anew");
  CHECK(folder.read() == later);
}

TEST_CASE("processes that start at once keep all that each has found") {
  constexpr int kProcesses = 6, kEach = 10;
  Folder folder;
  in_processes(kProcesses, [&](int process) {
    TimedChoices choices("GPU", folder.file());
    for (int i = 0; i < kEach; ++i)
      timed(choices, std::to_string(process) + " " + std::to_string(i), std::to_string(i));
  });
  TimedChoices all("GPU", folder.file());
  for (int process = 0; process < kProcesses; ++process)
    for (int i = 0; i < kEach; ++i)
      CHECK(known(all, std::to_string(process) + " " + std::to_string(i)) == std::to_string(i));
}

TEST_CASE("of processes that start at once one times, and the others take what it found") {
  Folder folder;
  folder.write("");
  const std::string tally = folder.file() + ".tally";
  in_processes(4, [&](int process) {
    TimedChoices choices("GPU", folder.file());
    choices.known_or_timed("a matmul", "", any(), [&] {
      std::ofstream(tally, std::ios::app) << "x";
      usleep(30000);
      return TimedChoices::Found{std::to_string(process), true};
    });
  });
  CHECK(fs::file_size(tally) == 1);
}
