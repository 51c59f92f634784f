#pragma once
// How long the start took, from the device to the end of the first step, and where that went.

#include "base/phases.h"
#include "run/hooks/hook.h"

namespace quern {

class StartLog final : public Hook {
 public:
  /// Of what comes before the first step.
  Phases phases;

  void before_step(const RunState& state, Step& step) override;
  /// {"event":"start","seconds":12.3,"device":0.5,"plan":0.1,...} once
  Verdict after_step(const RunState& state, const Step& step) override;

 private:
  bool done_ = false;
};

}  // namespace quern
