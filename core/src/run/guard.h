#pragma once
// Watches the numbers of a run: steps whose loss or gradient is not finite, which the device has not applied, and steps
// that stand out. It decides and remembers; the trainer acts.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "run/run_options.h"

namespace quern {

enum class NonFinite : std::uint8_t { stop, skip, roll_back };
std::string_view name_of(NonFinite action);

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

class Guard {
 public:
  explicit Guard(const GuardOptions& options);

  NonFinite policy() const { return policy_; }
  /// What to do about step `step`, which is not finite: the policy, or stop when the limit is reached.
  NonFinite failed(std::int64_t step);
  /// Takes in a step that was applied; returns what of it is a spike. Steps come in any order after a roll back.
  std::vector<Spike> passed(std::int64_t step, double loss, double gradient_norm);

  // ---- abandoning a step: what it moves before its update, the precision backend's states ----
  /// Before a step.
  void keep_states(Engine& engine);
  /// Puts back what keep_states has kept.
  void restore_states(Engine& engine) const;

 private:
  GuardOptions options_;
  NonFinite policy_;
  std::int64_t failures_ = 0;   ///< since `window` steps last went well
  std::int64_t furthest_ = -1;  ///< latest step that failed
  RunningWindow losses_, norms_;
  std::vector<std::byte> kept_;
};

}  // namespace quern
