#pragma once
// Learning-rate schedules. All warm up linearly: step s of a warm-up of w steps has the factor (s + 1) / w, so the
// first step already moves and step w is at the peak. Those that decay give the last step the final fraction exactly,
// even when the warm-up is as long as the run or longer and is cut off there.

#include <cstdint>
#include <vector>

#include "quern/optimizer.h"
#include "quern/options.h"
#include "quern/plugin.h"

namespace quern {

struct ConstantOptions {
  std::int64_t warmup = 0;
};
struct DecayOptions {  // cosine, linear
  std::int64_t warmup = 0;
  double final_fraction = 0.1;
};
struct WsdOptions {
  std::int64_t warmup = 0;
  double final_fraction = 0.1;
  std::int64_t cooldown = 0;
  double cooldown_fraction = 0.2;
};

OptionTable<ConstantOptions> constant_options();
OptionTable<DecayOptions> decay_options();
OptionTable<WsdOptions> wsd_options();

/// Warm-up, then the peak rate.
class ConstantSchedule final : public Schedule {
 public:
  explicit ConstantSchedule(const ConstantOptions& options) : options_(options) {}
  double factor(std::int64_t step, std::int64_t steps) const override;

 private:
  ConstantOptions options_;
};

/// Half a cosine from the peak to the final fraction.
class CosineSchedule final : public Schedule {
 public:
  explicit CosineSchedule(const DecayOptions& options) : options_(options) {}
  double factor(std::int64_t step, std::int64_t steps) const override;

 private:
  DecayOptions options_;
};

/// A straight line from the peak to the final fraction.
class LinearSchedule final : public Schedule {
 public:
  explicit LinearSchedule(const DecayOptions& options) : options_(options) {}
  double factor(std::int64_t step, std::int64_t steps) const override;

 private:
  DecayOptions options_;
};

/// Warm-up, stable, decay: the peak rate, then a cool-down of the form 1 - sqrt.
/// Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (2024).
class WsdSchedule final : public Schedule {
 public:
  explicit WsdSchedule(const WsdOptions& options) : options_(options) {}
  double factor(std::int64_t step, std::int64_t steps) const override;

 private:
  WsdOptions options_;
};

/// The built-in schedules, for the plugin host.
std::vector<Factory> schedule_factories();

}  // namespace quern
