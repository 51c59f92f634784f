// Fault: abort() leaves no fault.
#include "alone.h"

namespace {

class Deaf final : public Alone {
 public:
  Deaf() : Alone("deaf") {}
  void abort() noexcept override {}
};

}  // namespace

QUERN_PLUGIN("communicator", "deaf", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Communicator>("deaf", "one rank that does not hear abort()", {},
                                    [](const quern::OptionValues&) { return std::make_unique<Deaf>(); });
}
