// Fault: an option's default is outside its own range, another option is declared twice.
#include "sink.h"

QUERN_PLUGIN("log", "bad_default", manifest) {
  quern::OptionSpec low;
  low.key = "every";
  low.default_value = std::int64_t{0};
  low.minimum = 1;
  quern::OptionSpec twice;
  twice.key = "twice";
  twice.default_value = std::int64_t{0};
  manifest.add<quern::LogSink>("bad_default", "never seen", {low, twice, twice}, make_silent_sink);
}
