// Fault: two factories of one kind and id.
#include "sink.h"

QUERN_PLUGIN("log", "duplicate_id", manifest) {
  manifest.add<quern::LogSink>("duplicate_id", "first", {}, make_silent_sink);
  manifest.add<quern::LogSink>("duplicate_id", "second", {}, make_silent_sink);
}
