#pragma once
// Figures of quantized tensors for the log, in steps that observe (log.scales_every): what a tensor's values were and
// the loss under its scales. The plan's observations name these tensors, so any precision backend's are
// found.

#include <optional>
#include <string>
#include <vector>

#include "run/hooks/hook.h"

namespace quern {

struct ObservedTensor {
  std::string name;  ///< of the quantized values: "ffn_norm.e4m3"
  int layer = -1;    ///< -1: outside the layers
  std::string format;
  PlannedTensor observation;           ///< its ScaleObservation
  std::optional<PlannedTensor> state;  ///< of a delayed scale: its ScaleState, without the history
};

/// {"event":"scale","step":20,"tensor":"ffn_norm.e4m3","layer":3,"format":"e4m3","amax":2.1,"scale":0.0078125,
/// "redone":0,"clipped":0.0,"underflowed":0.003}: the largest scale, none of a tensor that is all zero, and where there
/// are others "smallest_scale"; "redone" for delayed scales only; fractions of the step's elements, "non_finite" where
/// it is above 0.
LogEvent scale_event(const ObservedTensor& tensor, const ScaleObservation& seen, const ScaleState* state,
                     std::int64_t step);

/// Adds what another rank observed of a tensor, in its micro-batches or in its rows of a weight.
void add_observation(ScaleObservation& to, const ScaleObservation& from);

/// An event for each tensor, of all ranks; collective. Blocks; to be called between a step's last micro-batch and its
/// update, which begins the figures anew.
std::vector<LogEvent> read_scales(Engine& engine, Ranks& ranks, const std::vector<ObservedTensor>& tensors,
                                  std::int64_t step);

class ScaleLog final : public Hook {
 public:
  /// Finds the tensors; warns when the run is to log them and has none.
  void open(const RunState& state);
  void before_step(const RunState& state, Step& step) override;
  void before_update(const RunState& state, const Step& step) override;
  /// Events of a step that is not finite too: they may tell why.
  Verdict after_step(const RunState& state, const Step& step) override;

 private:
  std::vector<ObservedTensor> observed_;
  std::vector<LogEvent> events_;  // of the step under way
};

}  // namespace quern
