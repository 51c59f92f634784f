#pragma once
// The loss that `quern eval --from` finds, of a run or an export.

#include <filesystem>
#include <string>

#include <doctest/doctest.h>

#include "end_to_end.h"

namespace quern::testing {

inline double eval_loss(const TinyFiles& files, const std::string& from, const Overrides& overrides) {
  const std::string out = files.at("eval.json");
  std::filesystem::remove(out);
  std::vector<std::string> words{"eval", files.config(), "--from", from, "--json", out};
  for (const std::string& setting : overrides) words.insert(words.end(), {"--set", setting});
  const Outcome outcome = quern_run(words);
  INFO(outcome.err);
  REQUIRE(outcome.code == 0);
  return nlohmann::json::parse(read_text(out)).at("total").at("loss");
}

}  // namespace quern::testing
