#include "run/hooks/spikes.h"

#include <algorithm>
#include <cmath>

namespace quern {

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

Spikes::Spikes(const GuardOptions& options)
    : least_z_(options.spike_z),
      losses_(static_cast<std::size_t>(options.window)),
      norms_(static_cast<std::size_t>(options.window)) {}

std::vector<Spike> Spikes::judge(double loss, double gradient_norm) {
  std::vector<Spike> spikes;
  if (least_z_ == 0) return spikes;
  for (const auto& judged : {losses_.judge("loss", loss), norms_.judge("grad_norm", gradient_norm)})
    if (judged && judged->z > least_z_) spikes.push_back(*judged);
  return spikes;
}

Verdict Spikes::after_step(const RunState& state, const Step& step) {
  if (!step.counts()) return Verdict::go_on;
  for (const Spike& spike : judge(step.loss(), double{step.result.update.gradient_norm}))
    state.log.write({"spike",
                     {{"step", step.number},
                      {"what", std::string(spike.what)},
                      {"value", spike.value},
                      {"z", spike.z},
                      {"mean", spike.mean},
                      {"deviation", spike.deviation},
                      {"data", step.data()}}});
  return Verdict::go_on;
}

}  // namespace quern
