// Fault: no factory of the id that the file and the manifest are named for.
#include "sink.h"

QUERN_PLUGIN("log", "wrong_id", manifest) {
  manifest.add<quern::LogSink>("another", "of another name", {}, make_silent_sink);
}
