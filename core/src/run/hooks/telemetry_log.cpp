#include "run/hooks/telemetry_log.h"

#include <utility>

#include "base/format.h"

namespace quern {

void TelemetryLog::while_updating(const RunState& state, const Step& step) {
  const bool shown =
      step.number == 1 || step.number == state.session.train.steps || step.number % state.session.log.every == 0;
  telemetry_ = shown ? state.session.device->telemetry() : Telemetry{};
}

Verdict TelemetryLog::after_step(const RunState& state, const Step& step) {
  LogEvent event{"telemetry", {{"step", step.number}}};
  for (const Reading& reading : telemetry_.readings)
    event.fields.emplace_back(reading.name + (reading.unit.empty() ? "" : "_" + reading.unit), reading.value);
  if (!telemetry_.readings.empty()) event.fields.emplace_back("slowed_by", format_list(telemetry_.slowed_by));
  if (!telemetry_.unavailable.empty() && !std::exchange(told_unavailable_, true))
    event.fields.emplace_back("unavailable", telemetry_.unavailable);
  if (event.fields.size() > 1) state.log.write(event);
  return Verdict::go_on;
}

}  // namespace quern
