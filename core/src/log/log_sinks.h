#pragma once
// The built-in log sinks, for the plugin host.

#include <vector>

#include "quern/plugin.h"

namespace quern {

/// console (on standard output) and jsonl.
std::vector<Factory> log_sink_factories();

}  // namespace quern
