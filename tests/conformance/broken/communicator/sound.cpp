// No fault.
#include "alone.h"

QUERN_PLUGIN("communicator", "sound", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Communicator>("sound", "one rank", {},
                                    [](const quern::OptionValues&) { return std::make_unique<Alone>("sound"); });
}
