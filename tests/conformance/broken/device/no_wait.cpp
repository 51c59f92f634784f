// Fault: wait does nothing, so that streams run as they like.
#include "cpu_with.h"

namespace {

class NoWait final : public Cpu {
 public:
  NoWait() : Cpu("no_wait") {}
  void wait(quern::Stream, quern::Event) override {}
};

}  // namespace

QUERN_PLUGIN("device", "no_wait", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Device>("no_wait", "streams that do not wait", {},
                              [](const quern::OptionValues&) { return std::make_unique<NoWait>(); });
}
