#pragma once
// A run's training state as the tensors of a checkpoint: their names, and whether a checkpoint holds this run's.

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"

namespace quern {

/// "master/qkv.weight/3"
std::string state_name(const PlannedTensor& tensor);

/// Kinds of states that are evaluated in place of masters (OptimizerState::evaluated).
std::vector<std::string> evaluated_states(const Plan& plan);

/// Reads into the engine what its plan has of the training state. The checkpoint must have the plan's parameters, no
/// more and no fewer, with equal shapes and dtypes, and for a plan that trains its optimizer state too; otherwise an
/// input error lists what differs; the model's states as its parameters. States of the precision backend may differ
/// when `changes`, what config_changes says of the checkpoint, names [precision]: then the states that do are reset,
/// and a warning is returned. `written` is called before the working copies are made, which ranks do together. The
/// masters of a plan that does not train are what the checkpoint's run evaluated.
std::vector<std::string> load_state(
    Engine& engine, const Checkpoint& checkpoint, const std::vector<std::string>& changes,
    const std::function<void()>& written = [] {});

}  // namespace quern
