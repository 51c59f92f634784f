#include "log/log_sinks.h"

#include <iostream>

#include <unistd.h>

#include "log/console_sink.h"
#include "log/jsonl_sink.h"
#include "quern/options.h"

namespace quern {

namespace {

struct JsonlOptions {
  std::string path;
};

OptionTable<JsonlOptions> jsonl_options() {
  OptionTable<JsonlOptions> t;
  t.add("path", &JsonlOptions::path, "file to write; empty: log.jsonl in the run's directory");
  return t;
}

struct ConsoleOptions {
  std::string style = "auto";
};

OptionTable<ConsoleOptions> console_options() {
  OptionTable<ConsoleOptions> t;
  t.add("style", &ConsoleOptions::style,
        "terminal: steps rewrite one line; plain: one line per step; auto: terminal where the output is one")
      .one_of({"auto", "plain", "terminal"});
  return t;
}

}  // namespace

std::vector<Factory> log_sink_factories() {
  Manifest manifest;
  manifest.add<LogSink>(
      "console", "readable lines on standard output", console_options().specs(), [](const OptionValues& values) {
        const std::string style = console_options().bind(values).style;
        bool terminal = style == "terminal" || (style == "auto" && ::isatty(STDOUT_FILENO) != 0);
        return std::make_unique<ConsoleSink>(std::cout, terminal ? ConsoleStyle::terminal : ConsoleStyle::plain);
      });
  manifest.add<LogSink>(
      "jsonl", "one JSON object per line, for programs", jsonl_options().specs(),
      [](const OptionValues& values) { return std::make_unique<JsonlSink>(jsonl_options().bind(values).path); });
  return std::move(manifest.factories);
}

}  // namespace quern
