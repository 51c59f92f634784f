#pragma once
// Figures of the tensors that have a delayed scale (ScaleState), for the log: what a step's values were and what their
// format lost. Which states these are is told by the op that advances them, so any precision backend's are found.

#include <string>
#include <vector>

#include "plan/plan.h"
#include "quern/log_sink.h"
#include "quern/step_state.h"

namespace quern {

class Engine;

/// A tensor with a delayed scale.
struct ScaledTensor {
  std::string name;  ///< of the codes: "ffn_norm.e4m3"
  int layer = -1;    ///< -1: outside the layers
  std::string format;
  PlannedTensor state;  ///< its ScaleState, without the history
};

/// By layer, those outside the layers last; empty without delayed scales.
std::vector<ScaledTensor> scaled_tensors(const Plan& plan);

/// {"event":"scale","step":20,"tensor":"ffn_norm.e4m3","layer":3,"format":"e4m3","amax":2.1,"scale":0.0078125,
/// "redone":0,"clipped":0.0,"underflowed":0.003}: the last two are fractions of the step's elements, and are there
/// when the backend counted.
LogEvent scale_event(const ScaledTensor& tensor, const ScaleState& state, std::int64_t step);

/// An event for each tensor. Blocks; to be called between a step's last micro-batch and its update, which begins the
/// figures anew.
std::vector<LogEvent> read_scales(Engine& engine, const std::vector<ScaledTensor>& tensors, std::int64_t step);

}  // namespace quern
