// Choices as text and in a file; no GPU is needed.
#include "timed_choices.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>

#include "matmul_plan.h"

using namespace quern::cuda;

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

TEST_CASE("choices that a run took survive as text, for one GPU") {
  TimedChoices choices("GPU", ""), same("GPU", ""), other("another GPU", "");
  choices.take("a product", "its algorithm");
  choices.load(R"({"another GPU": {"x": "y"}})");
  same.load(choices.save());
  other.load(choices.save());
  CHECK(same.find("a product") == "its algorithm");
  CHECK_FALSE(other.find("a product"));
  CHECK(same.save() == choices.save());
  CHECK(other.save() != choices.save());
  for (const char* text : {"", "{", "[]", "{\"x\": 1}", "null"}) CHECK_NOTHROW(choices.load(text));
  CHECK(choices.save() == same.save());
}

TEST_CASE("kinds of search have choices of their own in the file, but a run keeps what it took") {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("quern_marks_" + std::to_string(getpid()));
  const std::string file = (folder / "cuda.json").string();
  TimedChoices run("GPU", file);
  run.measure("a product", "of the list");
  TimedChoices other("GPU", file);
  CHECK_FALSE(other.find("a product", ", wide"));
  other.measure("a product", "of all", ", wide");
  CHECK(other.find("a product") == "of all");
  TimedChoices both("GPU", file);
  CHECK(both.find("a product") == "of the list");
  CHECK(both.find("a product", ", wide") == "of all");
  both.load(run.save());
  CHECK(both.find("a product", ", wide") == "of the list");
  fs::remove_all(folder);
}

TEST_CASE("measured choices outlive the process in a file, beside those of others") {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("quern_choices_" + std::to_string(getpid()));
  const std::string file = (folder / "below" / "cuda.json").string();
  {
    TimedChoices one("GPU", file), two("GPU 2", file);
    one.measure("attention", "16 0 plan");
    one.take("a guess", "not kept");
    two.measure("attention", "8 1 plan");
  }
  CHECK(TimedChoices("GPU", file).find("attention") == "16 0 plan");
  CHECK(TimedChoices("GPU 2", file).find("attention") == "8 1 plan");
  CHECK_FALSE(TimedChoices("GPU", file).find("a guess"));
  CHECK(TimedChoices("GPU", file).save() == TimedChoices("GPU", "").save());  // known, not taken
  {
    TimedChoices stale("GPU", file), fresh("GPU", file), checkpoint("GPU", "");
    checkpoint.take("loss", "an old one");
    stale.load(checkpoint.save());
    fresh.measure("attention", "2 0 plan");
    fresh.measure("loss", "a new one");
    stale.measure("matmul", "its algorithm");
  }
  CHECK(TimedChoices("GPU", file).find("matmul") == "its algorithm");
  CHECK(TimedChoices("GPU", file).find("attention") == "2 0 plan");  // neither what was in the file at the start
  CHECK(TimedChoices("GPU", file).find("loss") == "a new one");      // nor a checkpoint's takes its place
  std::ofstream(file) << "{ broken";
  TimedChoices again("GPU", file);
  CHECK_FALSE(again.find("attention"));
  again.measure("attention", "4 0 plan");
  CHECK(TimedChoices("GPU", file).find("attention") == "4 0 plan");
  fs::remove_all(folder);
}
