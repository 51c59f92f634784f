// Fault: an entry, but no note. Nothing of it may run.
#include <cstdlib>

#include "quern/plugin.h"

extern "C" __attribute__((visibility("default"))) void quern_plugin_manifest(quern::Manifest&) {}

static const bool runs = (std::abort(), true);
