#pragma once
// What generating needs of a run besides training: an engine with only its weights, and the tokens that end a text.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "run/session.h"

namespace quern {

/// Where weights come from; at most one is set. Neither: the newest whole checkpoint of the run's directory.
struct WeightSource {
  std::string checkpoint;  ///< a checkpoint, or a run directory, of which the newest
  std::string from;        ///< a Hugging Face model directory
};

struct Generation {
  std::unique_ptr<Engine> engine;
  std::vector<std::string> notes;  ///< for people: which weights were taken, and what was passed over
};

/// Opens the session's device and makes an engine on it for `geometry`, without gradients, and with all state on this
/// one device whatever the run shards or offloads. Its sequence is rounded up to what 8-bit products need.
Generation generation_engine(Session& session, const WeightSource& source, Geometry geometry);

/// eos_token_id, as the config.json in `from`, that of the run's model or of its tokenizer has it; empty when none has.
std::vector<std::int32_t> end_tokens(const Session& session, const std::string& from = {});

}  // namespace quern
