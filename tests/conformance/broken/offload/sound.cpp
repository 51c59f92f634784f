// No fault.
#include "host_store.h"

QUERN_PLUGIN("offload", "sound", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("sound", "host memory", {},
                                    [](const quern::OptionValues&) { return std::make_unique<HostStore>("sound"); });
}
