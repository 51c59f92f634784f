// The learning-rate schedule of the Transformer paper (Vaswani et al., 2017): linear warm-up, then the inverse square
// root of the step. At the end of the warm-up, step w, the factor is 1; at step s it is sqrt(w / s).
#include <algorithm>
#include <cmath>

#include "quern/plugin.h"

namespace {

using namespace quern;

struct Options {
  std::int64_t warmup = 10;
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("warmup", &Options::warmup, "steps up to the peak").at_least(1).at_most(std::int64_t{1} << 40);
  return t;
}

class RootDecay final : public Schedule {
 public:
  explicit RootDecay(const Options& options) : warmup_(static_cast<double>(options.warmup)) {}
  // A function of the step alone, so that a resumed run continues exactly.
  double factor(std::int64_t step, std::int64_t /*steps*/) const override {
    const double number = static_cast<double>(step) + 1;
    return std::min(number / warmup_, std::sqrt(warmup_ / number));
  }

 private:
  double warmup_;
};

}  // namespace

QUERN_PLUGIN("schedule", "root_decay", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Schedule>(
      "root_decay", "warm-up, then the inverse square root of the step", options().specs(),
      [](const OptionValues& values) { return std::make_unique<RootDecay>(options().bind(values)); });
}
