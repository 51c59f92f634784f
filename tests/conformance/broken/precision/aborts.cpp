// Fault: ends the process.
#include <cstdlib>

#include "quern/plugin.h"

namespace {

using namespace quern;

class Aborts final : public PrecisionBackend {
 public:
  const PrecisionTraits& traits() const override { return traits_; }
  void lower(const ProductSite&, Lowering&) const override { std::abort(); }

 private:
  PrecisionTraits traits_;
};

}  // namespace

QUERN_PLUGIN("aborts", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<PrecisionBackend>("aborts", "ends the process", {},
                                 [](const OptionValues&) { return std::make_unique<Aborts>(); });
}
