#pragma once
// Continues prompts, token by token: each one costs a forward pass over all rows of the plan's micro-batch, since no
// keys and values are kept. Prompts take the rows in turn; a row whose text has ended takes the next prompt.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "generate/prompts.h"
#include "generate/sampling.h"

namespace quern {

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
/// Asked before each pass; true: leave off.
using StopQuestion = std::function<bool()>;

/// Continuations in the prompts' order. The engine's plan has next_logits; the prompts have been checked, and with
/// max_tokens they fit its sequence. A text does not depend on the others but through scales that the precision shares
/// over the whole micro-batch. Leaves no trace in the training state. Left off, texts are as long as they got.
std::vector<Continuation> generate(Engine& engine, std::span<const Prompt> prompts, const GenerateSettings& settings,
                                   const TokenHandler& on_token = {}, const StopQuestion& stopped = {});

}  // namespace quern
