#pragma once
// A run's log: hands each event to every sink. A sink that fails costs the events that it did not take, and never the
// run: the other sinks get its name and the reason, and at the end how much is missing.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "quern/log_sink.h"

namespace quern {

class EventLog {
 public:
  /// Opens a sink; what it throws is thrown with its name.
  void add(const std::string& id, std::unique_ptr<LogSink> sink, const RunPlace& place);
  /// Each sink is tried with each event, also after it failed: a disk may have room again.
  void write(const LogEvent& event);
  void warn(const std::string& text) { write({"warning", {{"text", text}}}); }
  /// Warns of every sink that missed events. Returns the warnings, of this call and before, about sinks that failed and
  /// that no sink took.
  std::vector<std::string> end();

 private:
  struct Sink {
    std::string id;
    std::unique_ptr<LogSink> sink;
    std::int64_t missing = 0;
    std::string reason = {};  ///< of the first failure
    bool told = false;        ///< the others have been notified
  };
  bool deliver(const LogEvent& event);
  void warn_of_sink(const std::string& text);

  std::vector<Sink> sinks_;
  std::vector<std::string> untold_;
};

}  // namespace quern
