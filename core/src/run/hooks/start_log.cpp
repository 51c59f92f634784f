#include "run/hooks/start_log.h"

#include <algorithm>
#include <utility>

namespace quern {

void StartLog::before_step(const RunState&, Step&) {
  if (!done_) phases.enter("first step");
}

Verdict StartLog::after_step(const RunState& state, const Step&) {
  if (std::exchange(done_, true)) return Verdict::go_on;
  phases.split("graphs", state.engine.spent().graphs);
  phases.leave();
  LogEvent event{"start", {{"seconds", phases.total()}}};
  for (auto [phase, seconds] : phases.all()) {
    std::replace(phase.begin(), phase.end(), ' ', '_');
    event.fields.emplace_back(phase, seconds);
  }
  state.log.write(event);
  return Verdict::go_on;
}

}  // namespace quern
