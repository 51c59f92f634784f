// Fault: it takes memory that was never registered, which peers could not read.
#include "alone.h"

namespace {

class AnyMemory final : public Alone {
 public:
  AnyMemory() : Alone("any_memory") {}

 private:
  bool knows(const quern::View&) const override { return true; }
};

}  // namespace

QUERN_PLUGIN("communicator", "any_memory", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Communicator>("any_memory", "one rank that asks for no registration", {},
                                    [](const quern::OptionValues&) { return std::make_unique<AnyMemory>(); });
}
