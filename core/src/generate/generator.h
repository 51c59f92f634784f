#pragma once
// Continues prompts, token by token: each one costs a forward pass over all rows of the plan's micro-batch, since no
// keys and values are kept. Prompts take the rows in turn; a row whose text has ended takes the next prompt.

#include <functional>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "quern/generation.h"

namespace quern {

/// Asked before each pass; true: leave off.
using StopQuestion = std::function<bool()>;

/// Continuations in the prompts' order. The engine's plan has next_logits; the prompts have been checked, and with
/// max_tokens they fit its sequence. A text does not depend on the others but through scales that the precision shares
/// over the whole micro-batch. Leaves no trace in the training state. Left off, texts are as long as they got.
std::vector<Continuation> generate(Engine& engine, std::span<const Prompt> prompts, const GenerateSettings& settings,
                                   const TokenHandler& on_token = {}, const StopQuestion& stopped = {});

}  // namespace quern
