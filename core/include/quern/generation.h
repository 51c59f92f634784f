#pragma once
// Inputs and outputs of generation, in token numbers.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace quern {

struct Prompt {
  std::string where;  ///< for messages: "--prompt-tokens 1,2", "prompts.jsonl:3"
  std::vector<std::int32_t> tokens;
};

struct Sampling {
  double temperature = 1;  ///< logits are divided by it; 0: always the most likely token
  double top_p = 1;        ///< in (0, 1]: only the most likely tokens that together reach this probability
  std::uint64_t seed = 1;
};

struct GenerateSettings {
  std::int64_t max_tokens = 64;
  Sampling sampling;
  std::vector<std::int32_t> stop;  ///< tokens that end a text; they are not part of it
};

enum class Finish { length, stop };

struct Continuation {
  std::vector<std::int32_t> tokens;  ///< without the prompt's
  Finish finish = Finish::length;
};

/// Called with a prompt's number and its next token.
using TokenHandler = std::function<void(std::size_t prompt, std::int32_t token)>;

}  // namespace quern
