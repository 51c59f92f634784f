#pragma once
// Sinks of a run's events: console, JSON lines, and plugins.

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace quern {

/// Numbers and words in display order. The sink must write non-finite numbers in a valid form.
struct LogEvent {
  std::string kind;  ///< "run", "start", "step", "eval", "telemetry", "scale", "checkpoint", "sample", "spike",
                     ///< "non_finite", "warning", "end"; later versions may add others
  std::vector<std::pair<std::string, std::variant<std::int64_t, double, std::string>>> fields;
};

/// The run whose events a sink gets.
struct RunPlace {
  std::string directory;
  bool resumed = false;         ///< continue an existing log
  std::int64_t step_every = 1;  ///< a sink for people shows every n-th step
};

class LogSink {
 public:
  virtual ~LogSink() = default;
  /// Called once, before the first event.
  virtual void open(const RunPlace& place) = 0;
  virtual void write(const LogEvent& event) = 0;  ///< an exception loses the event, never the run
};

}  // namespace quern
