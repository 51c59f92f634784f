// Every fault of faults.h against the program: its code, one message with file and place, what was found and expected
// and what to do. docs/faults.md is the table of their output.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <regex>

#include <doctest/doctest.h>

#include "faults.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;

namespace {

const char* const kPage = QUERN_SOURCE_DIR "/docs/faults.md";
const char* const kIntroduction =
    R"(<!-- Made by tests/faults_test.cpp; do not edit. To renew: QUERN_WRITE_FAULTS=1 build/release/bin/whole_test -tc='faults have*' -->
# Faults, exit codes and messages

What `quern train` prints for each kind of fault, one message on standard error. Exit codes: 2 the config, 3 a file that
it reads, 4 resources, 5 numerics, 6 communication, 1 a fault of quern itself; 130 and 143 after Ctrl-C and SIGTERM. Here
paths start at the directory of the run's config; checksums, process ids and losses are placeholders.
)";

// The message without what differs from run to run or between checkouts.
std::string shown(const Outcome& outcome, const TinyFiles& files) {
  std::string text = outcome.err.substr(std::min(outcome.err.size(), outcome.err.find("quern: error: ") + 14));
  const std::string folder = std::filesystem::path(files.config()).parent_path().string() + "/";
  for (std::size_t at = text.find(folder); at != std::string::npos; at = text.find(folder))
    text.erase(at, folder.size());
  for (const auto& [from, to] : {std::pair("process [0-9]+", "process 4711"),
                                 {"/[^ ]*/build/[^ ]*plugins", "plugins"},
                                 {"[0-9a-f]{16}", "0123456789abcdef"},
                                 {"\\([^()]* a step\\)", "(9ms a step)"},
                                 {"loss sum [^,]*, gradient norm [^,]*", "loss sum inf, gradient norm nan"}})
    text = std::regex_replace(text, std::regex(from), to);
  return text;
}

std::string table_cell(std::string text) {
  while (text.ends_with('\n')) text.pop_back();
  for (const auto& [from, to] : {std::pair("&", "&amp;"), {"<", "&lt;"}, {"\\|", "&#124;"}, {"\n", "<br>"}})
    text = std::regex_replace(text, std::regex(from), to);
  return text;
}

std::string run_all(const std::string& title, const std::vector<Fault>& faults) {
  std::string table = "\n## " + title + "\n\n| fault | code | message |\n| --- | --- | --- |\n";
  for (const Fault& fault : faults) {
    CAPTURE(title);
    CAPTURE(fault.name);
    TinyFiles files;
    Outcome outcome = quern_run(fault.prepare(files));
    CAPTURE(outcome.err);
    CHECK(outcome.code == fault.code);
    CHECK(outcome.err.starts_with("quern: error: "));
    CHECK(occurrences(outcome.err, "quern: error: ") == 1);
    for (const std::string& part : fault.parts) {
      CAPTURE(part);
      CHECK(outcome.err.find(part) != std::string::npos);
    }
    table += "| " + table_cell(fault.name) + " | " + std::to_string(outcome.code) + " | " +
             table_cell(shown(outcome, files)) + " |\n";
  }
  return table;
}

}  // namespace

TEST_CASE("faults have their codes and messages, and the page shows them") {
  const std::string page = kIntroduction + run_all("The config", config_faults()) +
                           run_all("A model's config.json", model_config_faults()) +
                           run_all("Weights", weight_faults()) + run_all("Token files", token_file_faults()) +
                           run_all("Checkpoints and the run", run_faults());
  if (std::getenv("QUERN_WRITE_FAULTS") != nullptr) write_text(kPage, page);
  const bool same = read_text(kPage) == page;
  INFO("docs/faults.md differs from the program's present messages; its first line says how to renew it");
  CHECK(same);
}
