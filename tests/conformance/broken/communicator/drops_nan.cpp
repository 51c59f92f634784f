// Fault: a maximum passes over NaN, as fmax does.
#include <algorithm>
#include <cmath>
#include <limits>

#include "alone.h"

namespace {

class DropsNan final : public Alone {
 public:
  DropsNan() : Alone("drops_nan") {}
  void connect(const quern::Rendezvous& rendezvous, quern::Device& device) override {
    Alone::connect(rendezvous, device);
    device_ = &device;
  }
  void all_reduce(const quern::View& view, quern::Reduction reduction, quern::Stream stream) override {
    Alone::all_reduce(view, reduction, stream);
    if (reduction != quern::Reduction::maximum) return;
    auto drop = [view] {
      const auto is_nan = [](float value) { return std::isnan(value); };
      std::replace_if(view.as<float>(), view.as<float>() + view.count(), is_nan, std::numeric_limits<float>::lowest());
    };
    device_->call(drop, stream);
  }

 private:
  quern::Device* device_ = nullptr;
};

}  // namespace

QUERN_PLUGIN("communicator", "drops_nan", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Communicator>("drops_nan", "one rank whose maximum is never NaN", {},
                                    [](const quern::OptionValues&) { return std::make_unique<DropsNan>(); });
}
