// Messages about a config, a library or a device that changed.
#include "checkpoint/changes.h"

#include <doctest/doctest.h>

using namespace quern;

TEST_CASE("a library that is not the one before is reported, one that only one side has is not") {
  const std::vector<LibraryIdentity> before{{"quern", "0.1", "aa"}, {"plugin x", "1", "bb"}, {"plugin y", "1", "cc"}};
  CHECK(library_changes(before, before).empty());
  CHECK(library_changes({}, before).empty());
  CHECK(library_changes(before, {{"plugin x", "1", "dd"}, {"quern", "0.2", "aa"}, {"plugin z", "1", "cc"}}) ==
        std::vector<std::string>{"plugin x = 1, file dd (was 1, file bb)", "quern = 0.2, file aa (was 0.1, file aa)"});
  CHECK(library_changes({{"sums between ranks", "NCCL 2.27"}}, {{"sums between ranks", "NCCL 2.28"}}) ==
        std::vector<std::string>{"sums between ranks = NCCL 2.28 (was NCCL 2.27)"});
}

TEST_CASE("changes between two configs are reported by key, except those that change no number") {
  const std::string before =
      "[train]\nsteps = 8 # default\nseed = 1\n[model.llama]\nrope_theta = 1e4\n[log]\nevery = 1\n";
  CHECK(config_changes(before, before).empty());
  CHECK(config_changes(before, "[train]\nsteps = 12\nseed = 1\n[model]\nllama.rope_theta = 1e4\n") ==
        std::vector<std::string>{"train.steps = 12 (was 8)"});
  CHECK(config_changes("[train]\nsteps = 8\n", before) ==
        std::vector<std::string>{"model.llama.rope_theta = 10000.0 (was not set)", "train.seed = 1 (was not set)"});
  CHECK(config_changes(before, "[train]\nsteps = 8\nseed = 1\n") ==
        std::vector<std::string>{"model.llama.rope_theta is not set (was 10000.0)"});
  CHECK(config_changes("[train", before).size() == 1);
}

TEST_CASE("what a device no longer does as it did is named, whatever else its state holds") {
  const std::string before = R"({"GPU A, lib 1": {"16x16x16 NT": "0123"}, "threads": 2})";
  CHECK(device_changes(before, before).empty());
  CHECK(
      device_changes(before, R"({"GPU A, lib 1": {"16x16x16 NT": "0123", "new": "x"}, "threads": 2, "a": 1})").empty());
  CHECK(device_changes(before, R"({"GPU A, lib 1": {"16x16x16 NT": "4567"}, "threads": 4})") ==
        "16x16x16 NT = 4567 (was 0123); threads = 4 (was 2)");
  CHECK(device_changes(before, R"({"GPU B, lib 1": {"16x16x16 NT": "0123"}, "threads": 2})") ==
        "none of \"GPU A, lib 1\" is kept");
  CHECK(device_changes(before, R"({"GPU A, lib 1": 7, "threads": 2})") == "16x16x16 NT = none (was 0123)");
  const std::string digits(128, '1'), others(128, '2');
  CHECK(device_changes(R"({"GPU": {"a matmul": ")" + digits + R"("}})",
                       R"({"GPU": {"a matmul": ")" + others + R"("}})") == "a matmul");
}

TEST_CASE("states of devices that are no JSON objects, or hostile ones, are reported in few words or not at all") {
  for (const char* text : {"", "[]", "{", "null", "3"}) {
    CHECK(device_changes(text, "{}").empty());
    CHECK(device_changes(R"({"a": 1})", text).empty());
  }
  std::string deep, many;
  for (int i = 0; i < 100000; ++i) deep += R"({"a":)";
  deep += "1" + std::string(100000, '}');
  CHECK(device_changes(deep, R"({"a": {"a": 1}})").empty());
  for (int i = 0; i < 1000; ++i) many += ",\"" + std::string(1000, 'n') + std::to_string(i) + "\\n\":1";
  const std::string told = device_changes("{" + many.substr(1) + "}", "{}");
  CHECK(told.size() < 1000);
  CHECK(told.find("and 995 more") != std::string::npos);
}
