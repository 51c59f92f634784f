#include "train/schedules.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace quern {

namespace {

// Only while step < warmup; the peak is 1.
double warm(std::int64_t step, std::int64_t warmup) {
  return static_cast<double>(step + 1) / static_cast<double>(warmup);
}

bool is_last(std::int64_t step, std::int64_t steps) { return step >= steps - 1; }

// Part of the way from step `start`, at the peak, to the last step; in (0, 1) between them.
double progress(std::int64_t step, std::int64_t start, std::int64_t steps) {
  return static_cast<double>(step - start) / static_cast<double>(steps - 1 - start);
}

// The final fraction for `shape` 0, the peak for 1.
double between(double final_fraction, double shape) { return final_fraction + (1 - final_fraction) * shape; }

template <class T>
void add_warmup(OptionTable<T>& t) {
  t.add("warmup", &T::warmup, "steps of linear warm-up").at_least(0);
}

template <class T>
void add_final(OptionTable<T>& t) {
  t.add("final", &T::final_fraction, "rate of the last step, as a fraction of the peak").at_least(0).at_most(1);
}

template <class S, class Options>
auto maker(OptionTable<Options> (*table)()) {
  return [table](const OptionValues& values) { return std::make_unique<S>(table().bind(values)); };
}

}  // namespace

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

double ConstantSchedule::factor(std::int64_t step, std::int64_t) const {
  return step < options_.warmup ? warm(step, options_.warmup) : 1.0;
}

double CosineSchedule::factor(std::int64_t step, std::int64_t steps) const {
  if (is_last(step, steps)) return options_.final_fraction;
  if (step < options_.warmup) return warm(step, options_.warmup);
  double turned = std::numbers::pi * progress(step, options_.warmup, steps);
  return between(options_.final_fraction, 0.5 * (1 + std::cos(turned)));
}

double LinearSchedule::factor(std::int64_t step, std::int64_t steps) const {
  if (is_last(step, steps)) return options_.final_fraction;
  if (step < options_.warmup) return warm(step, options_.warmup);
  return between(options_.final_fraction, 1 - progress(step, options_.warmup, steps));
}

double WsdSchedule::factor(std::int64_t step, std::int64_t steps) const {
  if (is_last(step, steps)) return options_.final_fraction;
  if (step < options_.warmup) return warm(step, options_.warmup);
  double wanted = options_.cooldown > 0 ? static_cast<double>(options_.cooldown)
                                        : std::round(options_.cooldown_fraction * static_cast<double>(steps));
  double room = static_cast<double>(steps - 1 - options_.warmup);  // a cool-down never reaches into the warm-up
  std::int64_t start = steps - 1 - static_cast<std::int64_t>(std::clamp(wanted, 1.0, room));
  if (step <= start) return 1.0;
  return between(options_.final_fraction, 1 - std::sqrt(progress(step, start, steps)));
}

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
