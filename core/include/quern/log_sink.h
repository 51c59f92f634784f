#pragma once
// Where a run's events go: console, JSON lines, and what plugins add.

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace quern {

/// Numbers and words in the order in which they are to be shown. Non-finite numbers are for the sink to write validly.
struct LogEvent {
  std::string kind;  ///< "run", "step", "eval", "checkpoint", "warning", "end"
  std::vector<std::pair<std::string, std::variant<std::int64_t, double, std::string>>> fields;
};

class LogSink {
 public:
  virtual ~LogSink() = default;
  virtual void write(const LogEvent& event) = 0;
};

}  // namespace quern
