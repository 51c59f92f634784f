// No fault: what the others would be.
#include "sink.h"

QUERN_PLUGIN("log", "good", manifest) {
  manifest.version = "1.2";
  manifest.licence = "Apache-2.0";
  quern::OptionSpec spec;
  spec.key = "every";
  spec.default_value = std::int64_t{10};
  spec.minimum = 1;
  spec.help = "steps between writes";
  manifest.add<quern::LogSink>("good", "writes nothing", {spec}, make_silent_sink);
}
