#include <memory>

#include "memcpy_communicator.h"
#include "quern/plugin.h"

QUERN_PLUGIN("communicator", "memcpy", manifest) {
  using namespace quern;
  manifest.name = "memcpy";
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Communicator>(
      "memcpy", "ranks of one machine, which copy from each other's memory", memcpy::memcpy_options().specs(),
      [](const OptionValues& values) {
        return std::make_unique<memcpy::MemcpyCommunicator>(memcpy::memcpy_options().bind(values));
      });
}
