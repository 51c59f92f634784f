// Fault: throws while it is loaded. No caller can catch that: it would have to pass through the system's loader.
#include <stdexcept>

#include "../sink.h"

static const int left = [] {
  throw std::runtime_error("no licence file");
  return 0;
}();

QUERN_PLUGIN("log", "throws", manifest) { manifest.add<quern::LogSink>("throws", "never seen", {}, make_silent_sink); }
