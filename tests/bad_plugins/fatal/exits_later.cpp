// Fault: its factory ends the program.
#include <cstdlib>

#include "../sink.h"

QUERN_PLUGIN("log", "exits_later", manifest) {
  manifest.add<quern::LogSink>("exits_later", "never seen", {}, [](const quern::OptionValues& values) {
    std::exit(0);
    return make_silent_sink(values);
  });
}
