#pragma once
// Watches for steps whose loss or gradient is not finite, which the device has not applied, and decides how
// the run goes on. It also keeps what a step moves before its update, so that a step can be abandoned.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "quern/error.h"
#include "run/hooks/hook.h"

namespace quern {

/// As guard.non_finite has it: "skip"
std::string_view name_of(Verdict verdict);

class Guard final : public Hook {
 public:
  explicit Guard(const GuardOptions& options);

  Verdict policy() const { return policy_; }
  /// What to do about step `step`, which is not finite: the policy, or stop when the limit is reached.
  Verdict failed(std::int64_t step);
  /// Takes in a step that was applied. Steps come in any order after a roll back.
  void passed(std::int64_t step);
  /// Of a step that failed, and at which the run stops.
  Error error(const Step& step) const;

  /// Keeps the precision backend's states.
  void before_step(const RunState& state, Step& step) override;
  Verdict after_step(const RunState& state, const Step& step) override;
  /// Puts back what a step has moved before its update.
  void abandon_step(Engine& engine) const;

 private:
  GuardOptions options_;
  Verdict policy_;
  std::int64_t failures_ = 0;   ///< since `window` steps last went well
  std::int64_t furthest_ = -1;  ///< latest step that failed
  std::vector<std::byte> kept_;
};

}  // namespace quern
