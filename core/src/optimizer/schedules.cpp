#include "optimizer/schedules.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace quern {

namespace {

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

template <class T>
void add_warmup(OptionTable<T>& t) {
  t.add("warmup", &T::warmup,
        "steps of linear warm-up; a shorter run warms up to the peak in all its steps but the last")
      .at_least(0);
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

double ConstantSchedule::factor(std::int64_t step, std::int64_t steps) const {
  const std::int64_t warmup = fitted(options_.warmup, steps);
  return step < warmup ? warm(step, warmup) : 1.0;
}

double DecaySchedule::factor(std::int64_t step, std::int64_t steps) const {
  const std::int64_t warmup = fitted(warmup_, steps);
  if (is_last(step, steps)) return final_fraction_;
  if (step < warmup) return warm(step, warmup);
  if (steps == 1) return 1.0;
  return final_fraction_ + (1 - final_fraction_) * shape(step, warmup, steps);
}

double CosineSchedule::shape(std::int64_t step, std::int64_t warmup, std::int64_t steps) const {
  return 0.5 * (1 + std::cos(std::numbers::pi * progress(step, warmup, steps)));
}

double LinearSchedule::shape(std::int64_t step, std::int64_t warmup, std::int64_t steps) const {
  return 1 - progress(step, warmup, steps);
}

double WsdSchedule::shape(std::int64_t step, std::int64_t warmup, std::int64_t steps) const {
  double wanted =
      cooldown_ > 0 ? static_cast<double>(cooldown_) : std::round(cooldown_fraction_ * static_cast<double>(steps));
  double room = static_cast<double>(steps - 1 - warmup);  // a cool-down never reaches into the warm-up
  std::int64_t start = steps - 1 - static_cast<std::int64_t>(std::clamp(wanted, 1.0, room));
  return step <= start ? 1.0 : 1 - std::sqrt(progress(step, start, steps));
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
