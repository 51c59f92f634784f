// Fault: fill() throws after it has added a factory.
#include <stdexcept>

#include "sink.h"

QUERN_PLUGIN("log", "throwing_fill", manifest) {
  manifest.add<quern::LogSink>("throwing_fill", "never seen", {}, make_silent_sink);
  throw std::runtime_error("no licence file");
}
