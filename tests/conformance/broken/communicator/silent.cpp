// Fault: error() says nothing.
#include "memcpy_with.h"

namespace {

class Silent final : public MemcpyWith {
 public:
  Silent() : MemcpyWith("silent") {}
  std::optional<std::string> error() override { return std::nullopt; }
};

}  // namespace

QUERN_PLUGIN("communicator", "silent", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Communicator>("silent", "tells no fault", {},
                                    [](const quern::OptionValues&) { return std::make_unique<Silent>(); });
}
