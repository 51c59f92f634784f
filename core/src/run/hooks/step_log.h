#pragma once
// The log's line of each step, and the run's clock: how long steps take, and how long the run still will.

#include <limits>
#include <vector>

#include "run/hooks/hook.h"

namespace quern {

class StepLog final : public Hook {
 public:
  /// Before this session's first step; times that are logged count from here.
  void begin(const RunState& state);
  void before_step(const RunState& state, Step& step) override;
  Verdict after_step(const RunState& state, const Step& step) override;
  void rolled_back(const RunState& state) override;

  double elapsed() const;  ///< seconds since `begin`
  // Of the last step that had a loss; NaN: there was none.
  double last_loss() const { return last_loss_; }
  double last_gradient_norm() const { return last_gradient_norm_; }
  // Of the last step; NaN: there was none.
  double last_learning_rate() const { return last_learning_rate_; }
  double last_seconds() const { return last_seconds_; }
  /// Of this session's training steps, without evaluations and checkpoints; 0: there was none.
  double tokens_per_second(const RunState& state) const;

 private:
  void add_ranks(const RunState& state, const Step& step, LogEvent& event) const;

  double started_ = 0, in_steps_ = 0;  // the clock then; seconds of steps since
  double waited_ = 0;                  // seconds that the compute stream had waited for collectives before the step
  std::int64_t started_at_ = 0;
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  double last_loss_ = kNone, last_gradient_norm_ = kNone, last_learning_rate_ = kNone, last_seconds_ = kNone;
};

}  // namespace quern
