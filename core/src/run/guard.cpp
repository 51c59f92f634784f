#include "run/guard.h"

#include <algorithm>
#include <cmath>

#include "quern/error.h"

namespace quern {

namespace {

constexpr std::string_view kNames[] = {"stop", "skip", "roll_back"};

NonFinite policy_named(const std::string& name) {
  auto it = std::find(std::begin(kNames), std::end(kNames), name);
  if (it == std::end(kNames)) fail_internal("guard", "no policy " + name);
  return static_cast<NonFinite>(it - std::begin(kNames));
}

// The plan lays the precision backend's states side by side: one copy takes all. Empty where there are none.
PlannedTensor precision_states(const Plan& plan) {
  auto is_state = [](const PlannedTensor& tensor) { return tensor.owner == TensorOwner::precision; };
  std::int64_t begin = plan.device_bytes, end = 0;
  for (const PlannedTensor& tensor : plan.tensors)
    if (is_state(tensor)) begin = std::min(begin, tensor.offset), end = std::max(end, tensor.offset + tensor.bytes());
  for (const PlannedTensor& tensor : plan.tensors)
    if (!is_state(tensor) && tensor.store < 0 && tensor.offset < end && tensor.offset + tensor.bytes() > begin)
      fail_internal("guard", tensor.kind + " lies among the precision states");
  return {.owner = TensorOwner::precision,
          .kind = "precision states",
          .dtype = DType::u8,
          .extents = {std::max<std::int64_t>(end - begin, 0)},
          .offset = begin};
}

}  // namespace

std::string_view name_of(NonFinite action) { return kNames[static_cast<std::size_t>(action)]; }

std::optional<Spike> RunningWindow::judge(std::string_view what, double value) {
  std::optional<Spike> judged;
  if (values_.size() == size_) {
    const auto count = static_cast<double>(size_);
    double sum = 0, squares = 0;
    for (double known : values_) sum += known;
    const double mean = sum / count;
    for (double known : values_) squares += (known - mean) * (known - mean);
    // A series that does not move has rounding errors for a deviation.
    const double deviation = std::max(std::sqrt(squares / (count - 1)), 1e-6 * std::abs(mean));
    judged = {what, value, mean, deviation, deviation > 0 ? (value - mean) / deviation : 0};
    values_.pop_front();
  }
  values_.push_back(value);
  return judged;
}

Guard::Guard(const GuardOptions& options)
    : options_(options),
      policy_(policy_named(options.non_finite)),
      losses_(static_cast<std::size_t>(options.window)),
      norms_(static_cast<std::size_t>(options.window)) {}

NonFinite Guard::failed(std::int64_t step) {
  furthest_ = std::max(furthest_, step);
  if (policy_ == NonFinite::stop || ++failures_ > options_.limit) return NonFinite::stop;
  return policy_;
}

std::vector<Spike> Guard::passed(std::int64_t step, double loss, double gradient_norm) {
  if (step >= furthest_ + options_.window) failures_ = 0;
  std::vector<Spike> spikes;
  if (options_.spike_z == 0) return spikes;
  for (const auto& judged : {losses_.judge("loss", loss), norms_.judge("grad_norm", gradient_norm)})
    if (judged && judged->z > options_.spike_z) spikes.push_back(*judged);
  return spikes;
}

void Guard::keep_states(Engine& engine) {
  const PlannedTensor states = precision_states(engine.plan());
  kept_.resize(static_cast<std::size_t>(states.bytes()));
  if (!kept_.empty()) engine.read(states, kept_.data());
}

void Guard::restore_states(Engine& engine) const {
  if (!kept_.empty()) engine.write(precision_states(engine.plan()), kept_.data());
}

}  // namespace quern
