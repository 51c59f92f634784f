#pragma once
// What using a run's weights needs besides training: an engine with them alone, and the tokens that end a text.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "quern/run.h"
#include "run/session.h"

namespace quern {

struct Inference {
  std::unique_ptr<Engine> engine;
  OpenedWeights weights;
};

/// How the run's model is planned without gradients, and with all state on this one device whatever the run shards or
/// offloads.
PlanOptions inference_options(const Session& session);
/// Opens the session's device and makes an engine on it.
Inference open_inference(Session& session, const WeightSource& source, const PlanOptions& options);

/// eos_token_id, as config.json and generation_config.json in `from`, the run's model or its tokenizer have them,
/// and without `from` what ends the replies that the run learns; empty when none is known.
std::vector<std::int32_t> end_tokens(const Session& session, const std::string& from = {});

}  // namespace quern
