// Fault: calls a function that nothing defines; immediate binding must find out at load time.
#include "sink.h"

extern "C" void quern_test_symbol_that_nobody_defines();

QUERN_PLUGIN("log", "undefined_symbol", manifest) {
  quern_test_symbol_that_nobody_defines();
  manifest.add<quern::LogSink>("undefined_symbol", "never seen", {}, make_silent_sink);
}
