// Fault: ends the program while it is loaded, as if all were well.
#include <cstdlib>

#include "../sink.h"

static const int left = [] {
  std::exit(0);
  return 0;
}();

QUERN_PLUGIN("log", "exits", manifest) { manifest.add<quern::LogSink>("exits", "never seen", {}, make_silent_sink); }
