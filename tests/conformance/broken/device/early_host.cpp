// Fault: the host does not wait for events.
#include "cpu_with.h"

namespace {

class EarlyHost final : public Cpu {
 public:
  EarlyHost() : Cpu("early_host") {}
  using Cpu::synchronize;
  void synchronize(quern::Event) override {}
};

}  // namespace

QUERN_PLUGIN("device", "early_host", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Device>("early_host", "a host that does not wait", {},
                              [](const quern::OptionValues&) { return std::make_unique<EarlyHost>(); });
}
