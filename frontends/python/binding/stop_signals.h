#pragma once
// Signals that stop a run as they stop `quern train`: it saves; then the signal takes its course, which for Ctrl-C in
// Python is a KeyboardInterrupt.

#include <csignal>
#include <initializer_list>
#include <utility>
#include <vector>

#include "quern/run.h"

namespace quern::python {

/// While one lives, these signals set `requests.stop`, except those that the process ignores or that another
/// StopSignals has. The same signal again, a second later or more, ends the process at once. Its end restores the
/// handlers, and raises what came.
class StopSignals {
 public:
  StopSignals(RunRequests& requests, std::initializer_list<int> signals);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  std::vector<std::pair<int, struct sigaction>> before_;  // of the signals taken
};

/// In a rank that quern started: from now on the starter's signals stop or save this run; null: they end the process.
void hear_starter(RunRequests* requests);

/// In a child that fork made: the signals that the parent's runs took from the default are default again.
void release_signals();

/// The process leaves this signal its default action.
bool is_default(int signal);

}  // namespace quern::python
