#include "optimizer/schedules.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "quern/optimizer.h"
#include "quern/options.h"

namespace quern {

namespace {

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

template <class T>
void add_warmup(OptionTable<T>& t) {
  t.add("warmup", &T::warmup,
        "steps of linear warm-up; a shorter run warms up to the peak in all its steps but the last")
      .at_least(0);
}

template <class T>
void add_final(OptionTable<T>& t) {
  t.add("final", &T::final_fraction,
        "rate of the last step, as a fraction of the peak; a run of one step is at the peak")
      .at_least(0)
      .at_most(1);
}

OptionTable<ConstantOptions> constant_options() {
  OptionTable<ConstantOptions> t;
  add_warmup(t);
  return t;
}

OptionTable<DecayOptions> decay_options() {
  OptionTable<DecayOptions> t;
  add_warmup(t);
  add_final(t);
  return t;
}

OptionTable<WsdOptions> wsd_options() {
  OptionTable<WsdOptions> t;
  add_warmup(t);
  add_final(t);
  t.add("cooldown", &WsdOptions::cooldown, "steps of cool-down; 0: cooldown_fraction of the run").at_least(0);
  t.add("cooldown_fraction", &WsdOptions::cooldown_fraction, "part of the run that cools down").at_least(0).at_most(1);
  return t;
}

// Of a run that is shorter than its warm-up, what leaves room for the last step.
std::int64_t fitted(std::int64_t warmup, std::int64_t steps) { return std::min(warmup, steps - 1); }

// Only while step < warmup; the peak is 1.
double warm(std::int64_t step, std::int64_t warmup) {
  return static_cast<double>(step + 1) / static_cast<double>(warmup);
}

// A run of one step has its first for its last, and takes it at the peak.
bool is_last(std::int64_t step, std::int64_t steps) { return steps > 1 && step >= steps - 1; }

// Part of the way from step `start`, at the peak, to the last step; in (0, 1) between them.
double progress(std::int64_t step, std::int64_t start, std::int64_t steps) {
  return static_cast<double>(step - start) / static_cast<double>(steps - 1 - start);
}

/// Warm-up, then the peak rate.
class ConstantSchedule final : public Schedule {
 public:
  explicit ConstantSchedule(const ConstantOptions& options) : options_(options) {}
  double factor(std::int64_t step, std::int64_t steps) const override {
    const std::int64_t warmup = fitted(options_.warmup, steps);
    return step < warmup ? warm(step, warmup) : 1.0;
  }

 private:
  ConstantOptions options_;
};

/// Those that end at the final fraction.
class DecaySchedule : public Schedule {
 public:
  DecaySchedule(std::int64_t warmup, double final_fraction) : warmup_(warmup), final_fraction_(final_fraction) {}
  double factor(std::int64_t step, std::int64_t steps) const final {
    const std::int64_t warmup = fitted(warmup_, steps);
    if (is_last(step, steps)) return final_fraction_;
    if (step < warmup) return warm(step, warmup);
    if (steps == 1) return 1.0;
    return final_fraction_ + (1 - final_fraction_) * shape(step, warmup, steps);
  }

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
  double shape(std::int64_t step, std::int64_t warmup, std::int64_t steps) const override {
    return 0.5 * (1 + std::cos(std::numbers::pi * progress(step, warmup, steps)));
  }
};

/// A straight line from the peak to the final fraction.
class LinearSchedule final : public DecaySchedule {
 public:
  explicit LinearSchedule(const DecayOptions& options) : DecaySchedule(options.warmup, options.final_fraction) {}

 private:
  double shape(std::int64_t step, std::int64_t warmup, std::int64_t steps) const override {
    return 1 - progress(step, warmup, steps);
  }
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
  double shape(std::int64_t step, std::int64_t warmup, std::int64_t steps) const override {
    double wanted =
        cooldown_ > 0 ? static_cast<double>(cooldown_) : std::round(cooldown_fraction_ * static_cast<double>(steps));
    double room = static_cast<double>(steps - 1 - warmup);  // a cool-down never reaches into the warm-up
    std::int64_t start = steps - 1 - static_cast<std::int64_t>(std::clamp(wanted, 1.0, room));
    return step <= start ? 1.0 : 1 - std::sqrt(progress(step, start, steps));
  }

  std::int64_t cooldown_;
  double cooldown_fraction_;
};

template <class S, class Options>
auto maker(OptionTable<Options> (*table)()) {
  return [table](const OptionValues& values) { return std::make_unique<S>(table().bind(values)); };
}

}  // namespace

std::vector<Factory> schedule_factories() {
  Manifest manifest;
  manifest.add<Schedule>("constant", "the peak rate after warm-up", constant_options().specs(),
                         maker<ConstantSchedule>(constant_options));
  manifest.add<Schedule>("cosine", "half a cosine down to a fraction of the peak", decay_options().specs(),
                         maker<CosineSchedule>(decay_options));
  manifest.add<Schedule>("linear", "a straight line down to a fraction of the peak", decay_options().specs(),
                         maker<LinearSchedule>(decay_options));
  manifest.add<Schedule>("wsd", "the peak rate, then a 1 - sqrt cool-down", wsd_options().specs(),
                         maker<WsdSchedule>(wsd_options));
  return std::move(manifest.factories);
}

}  // namespace quern
