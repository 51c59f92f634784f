#include "ab/run_log.h"

#include <cmath>
#include <fstream>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "quern/error.h"

using namespace quern;
using namespace quern::ab;

namespace {

RunLog log_of(const std::vector<double>& losses) {
  RunLog log;
  for (double loss : losses) log.steps.push_back({static_cast<std::int64_t>(log.steps.size() + 1), loss, 1, 1});
  return log;
}

}  // namespace

TEST_CASE("a log is read to the bit, without its unfinished line") {
  TestDirectory directory;
  std::ofstream(directory / "log.jsonl")
      << R"({"event":"run","tokens_per_step":32,"device_bytes":1000})"
      << "\n"
      << R"({"event":"step","step":1,"loss":0.1,"grad_norm":2.5,"tokens_per_second":7})"
      << "\n"
      << R"({"event":"step","step":2,"loss":null,"loss_text":"nan"})"
      << "\n"
      << R"({"event":"eval","step":2,"loss":4.25})"
      << "\n"
      << R"({"event":"step","step":3,"loss":5.0)";
  RunLog log = read_run_log(directory / "log.jsonl");
  CHECK(log.tokens_per_step == 32);
  CHECK(log.device_bytes == 1000);
  REQUIRE(log.steps.size() == 2);
  CHECK(log.steps[0].loss == 0.1);
  CHECK(log.steps[0].gradient_norm == 2.5);
  CHECK(std::isnan(log.steps[1].loss));
  CHECK(log.validation_loss == 4.25);
  CHECK_FALSE(log.ended);
}

TEST_CASE("steps that a resumed run repeats replace the first ones") {
  TestDirectory directory;
  std::ofstream file(directory / "log.jsonl");
  file << "[]\n3\n{}\n{\"event\":4}\n";  // nothing that a run writes, and nothing to read
  for (int step : {1, 2, 3, 2, 3})
    file << R"({"event":"step","step":)" << step << R"(,"loss":1})"
         << "\n";
  file << R"({"event":"end"})"
       << "\n";
  file.close();
  RunLog log = read_run_log(directory / "log.jsonl");
  CHECK(log.steps.size() == 3);
  CHECK(log.ended);
}

TEST_CASE("a log that is missing or damaged is named") {
  TestDirectory directory;
  CHECK_THROWS_WITH_AS(read_run_log(directory / "log.jsonl"), doctest::Contains("cannot be read"), Error);
  std::ofstream(directory / "log.jsonl") << "{}\n{]\n";
  CHECK_THROWS_WITH_AS(read_run_log(directory / "log.jsonl"), doctest::Contains("log.jsonl:2: not JSON"), Error);
}

TEST_CASE("the first difference is by bits, and an end is one") {
  double next = std::nextafter(2.0, 3.0), nan = std::nan("");
  CHECK_FALSE(first_difference(log_of({1, 2, 3}), log_of({1, 2, 3})));
  CHECK(first_difference(log_of({1, 2, 3}), log_of({1, next, 3})) == 2);
  CHECK(first_difference(log_of({0.0}), log_of({-0.0})) == 1);
  CHECK_FALSE(first_difference(log_of({nan}), log_of({-nan})));
  CHECK(first_difference(log_of({1, 2}), log_of({1, 2, 3})) == 3);
  CHECK(first_difference(log_of({1, 2, 3}), log_of({})) == 1);
}
