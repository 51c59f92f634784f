#pragma once
// The smallest plugin that works, for faults to be added to.

#include <memory>

#include "quern/plugin.h"

struct SilentSink final : quern::LogSink {
  void open(const quern::RunPlace&) override {}
  void write(const quern::LogEvent&) override {}
};

inline std::unique_ptr<quern::LogSink> make_silent_sink(const quern::OptionValues&) {
  return std::make_unique<SilentSink>();
}
