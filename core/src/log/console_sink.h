#pragma once
// Events for a person at a terminal, or reading a job's output. Steps are aligned lines,
//   step   120/1000  loss 4.8123   lr 3.0e-04  norm 1.23   3.41k tok/s  eta 2m10s
// On a terminal the step line rewrites itself, and stays when another event follows.

#include <ostream>

#include "quern/log_sink.h"

namespace quern {

enum class ConsoleStyle { plain, terminal };

class ConsoleSink final : public LogSink {
 public:
  /// `out` is borrowed and outlives the sink.
  ConsoleSink(std::ostream& out, ConsoleStyle style) : out_(out), style_(style) {}
  ~ConsoleSink() override;
  ConsoleSink(const ConsoleSink&) = delete;
  ConsoleSink& operator=(const ConsoleSink&) = delete;
  void open(const RunPlace& place) override { step_every_ = place.step_every; }
  void write(const LogEvent& event) override;

 private:
  void end_progress();
  bool newly_slowed(const LogEvent& event);

  std::ostream& out_;
  ConsoleStyle style_;
  std::int64_t step_every_ = 1;  // plain lines only; a terminal shows each
  bool in_progress_ = false;     // the cursor stands behind a step line
  std::string slowed_by_;        // as the last telemetry had it
};

/// The event as plain text, without colours or line end. Fields that an event does not have are left out; fields of an
/// unknown kind are shown by name.
std::string to_console_line(const LogEvent& event);

}  // namespace quern
