// Faults: the factor is no number at one step late in a run, and an option has no effect.
#include <cmath>

#include "quern/options.h"
#include "quern/plugin.h"

namespace {

struct Options {
  double floor = 0;
};

quern::OptionTable<Options> options() {
  quern::OptionTable<Options> t;
  t.add("floor", &Options::floor, "least factor, which nothing reads").at_least(0).at_most(1);
  return t;
}

class LateNan final : public quern::Schedule {
 public:
  double factor(std::int64_t step, std::int64_t steps) const override {
    return step == 8999 ? std::nan("") : 1 - static_cast<double>(step) / static_cast<double>(steps);
  }
};

}  // namespace

QUERN_PLUGIN("schedule", "late_nan", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Schedule>("late_nan", "linear", options().specs(),
                                [](const quern::OptionValues&) { return std::make_unique<LateNan>(); });
}
