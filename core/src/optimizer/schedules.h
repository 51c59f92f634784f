#pragma once
// Learning-rate schedules. All warm up linearly: step s of a warm-up of w steps has the factor (s + 1) / w, so the
// first step already moves and step w is at the peak. Those that decay give the last step the final fraction exactly.
// A warm-up that leaves no step for that is taken as one of all steps but the last: every run reaches the peak. A run
// of one step is at the peak.

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

/// Those that end at the final fraction.
class DecaySchedule : public Schedule {
 public:
  DecaySchedule(std::int64_t warmup, double final_fraction) : warmup_(warmup), final_fraction_(final_fraction) {}
  double factor(std::int64_t step, std::int64_t steps) const final;

 private:
  /// 1 at the peak, 0 at the final fraction; for steps after the warm-up and before the last.
  virtual double shape(std::int64_t step, std::int64_t warmup, std::int64_t steps) const = 0;

  std::int64_t warmup_;
  double final_fraction_;
};

/// Half a cosine from the peak to the final fraction.
class CosineSchedule final : public DecaySchedule {
 public:
  explicit CosineSchedule(const DecayOptions& options) : DecaySchedule(options.warmup, options.final_fraction) {}

 private:
  double shape(std::int64_t step, std::int64_t warmup, std::int64_t steps) const override;
};

/// A straight line from the peak to the final fraction.
class LinearSchedule final : public DecaySchedule {
 public:
  explicit LinearSchedule(const DecayOptions& options) : DecaySchedule(options.warmup, options.final_fraction) {}

 private:
  double shape(std::int64_t step, std::int64_t warmup, std::int64_t steps) const override;
};

/// Warm-up, stable, decay: the peak rate, then a cool-down of the form 1 - sqrt.
/// Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (2024).
class WsdSchedule final : public DecaySchedule {
 public:
  explicit WsdSchedule(const WsdOptions& options)
      : DecaySchedule(options.warmup, options.final_fraction),
        cooldown_(options.cooldown),
        cooldown_fraction_(options.cooldown_fraction) {}

 private:
  double shape(std::int64_t step, std::int64_t warmup, std::int64_t steps) const override;

  std::int64_t cooldown_;
  double cooldown_fraction_;
};

/// The built-in schedules, for the plugin host.
std::vector<Factory> schedule_factories();

}  // namespace quern
