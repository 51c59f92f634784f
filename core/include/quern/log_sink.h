#pragma once
// Where a run's events go: console, JSON lines, and what plugins add.

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace quern {

/// Numbers and words in the order in which they are to be shown. Non-finite numbers are for the sink to write validly.
struct LogEvent {
  std::string kind;  ///< "run", "step", "eval", "telemetry", "scale", "checkpoint", "sample", "spike", "non_finite",
                     ///< "warning", "end"
  std::vector<std::pair<std::string, std::variant<std::int64_t, double, std::string>>> fields;
};

/// The run that a sink is to tell of.
struct RunPlace {
  std::string directory;
  bool resumed = false;         ///< go on with a log that is there
  std::int64_t step_every = 1;  ///< a sink for people shows every n-th step
};

class LogSink {
 public:
  virtual ~LogSink() = default;
  /// Called once, before the first event.
  virtual void open(const RunPlace& place) = 0;
  virtual void write(const LogEvent& event) = 0;  ///< what it throws costs the event, and never the run
};

}  // namespace quern
