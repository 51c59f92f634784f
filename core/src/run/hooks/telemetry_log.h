#pragma once
// The device's telemetry (clocks, power, temperature), asked with the steps that the log shows.

#include "run/hooks/hook.h"

namespace quern {

class TelemetryLog final : public Hook {
 public:
  void while_updating(const RunState& state, const Step& step) override;
  /// {"event":"telemetry","step":20,"sm_clock_MHz":1755.0,...,"slowed_by":"power limit"}
  Verdict after_step(const RunState& state, const Step& step) override;

 private:
  Telemetry telemetry_;
  bool told_unavailable_ = false;
};

}  // namespace quern
