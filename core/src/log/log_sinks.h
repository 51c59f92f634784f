#pragma once
// The built-in log sinks, for the plugin host.

#include <vector>

#include "log/jsonl_sink.h"
#include "quern/options.h"
#include "quern/plugin.h"

namespace quern {

struct JsonlOptions {
  std::string path;
};
OptionTable<JsonlOptions> jsonl_options();

struct ConsoleOptions {
  std::string style = "auto";
};
OptionTable<ConsoleOptions> console_options();

/// console (on standard output) and jsonl.
std::vector<Factory> log_sink_factories();

}  // namespace quern
