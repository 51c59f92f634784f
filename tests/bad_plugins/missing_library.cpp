// Fault: needs a library that no folder known to it has (gone/gone.cpp).
#include "sink.h"

extern "C" void quern_test_library_that_is_gone();

QUERN_PLUGIN("log", "missing_library", manifest) {
  quern_test_library_that_is_gone();
  manifest.add<quern::LogSink>("missing_library", "never seen", {}, make_silent_sink);
}
