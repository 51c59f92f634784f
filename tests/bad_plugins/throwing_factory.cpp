// Fault: factories that throw a standard exception, an Error, something else, or return nothing.
#include <stdexcept>

#include "quern/error.h"
#include "sink.h"

using Sink = std::unique_ptr<quern::LogSink>;

QUERN_PLUGIN("log", "throwing_factory", manifest) {
  manifest.add<quern::LogSink>("throwing_factory", "throws a standard exception", {},
                               [](const quern::OptionValues&) -> Sink { throw std::runtime_error("socket closed"); });
  manifest.add<quern::LogSink>("throws_error", "throws an Error", {}, [](const quern::OptionValues&) -> Sink {
    throw quern::Error(quern::ErrorCode::input, {"a.json:3", "bad field", "x", "y", "mend it"});
  });
  manifest.add<quern::LogSink>("throws_int", "throws an int", {}, [](const quern::OptionValues&) -> Sink { throw 5; });
  manifest.add<quern::LogSink>("returns_null", "returns nothing", {},
                               [](const quern::OptionValues&) { return Sink(); });
}
