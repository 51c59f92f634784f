#pragma once
// Losses and gradient norms far above the steps before: logged with the data of their step.

#include <cstddef>
#include <deque>
#include <optional>
#include <string_view>
#include <vector>

#include "run/hooks/hook.h"

namespace quern {

/// A value far above those before it.
struct Spike {
  std::string_view what;  ///< "loss" or "grad_norm"
  double value = 0, mean = 0, deviation = 0, z = 0;
};

/// The last `window` values of a series.
class RunningWindow {
 public:
  explicit RunningWindow(std::size_t size) : size_(size) {}
  /// How `value` stands to the window, once that is full: mean, standard deviation and z. Then takes it in.
  std::optional<Spike> judge(std::string_view what, double value);

 private:
  std::size_t size_;
  std::deque<double> values_;
};

class Spikes final : public Hook {
 public:
  explicit Spikes(const GuardOptions& options);
  /// Takes in a step that was applied; returns what of it is a spike.
  std::vector<Spike> judge(double loss, double gradient_norm);
  Verdict after_step(const RunState& state, const Step& step) override;

 private:
  double least_z_;  // 0: none is a spike
  RunningWindow losses_, norms_;
};

}  // namespace quern
