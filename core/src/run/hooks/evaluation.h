#pragma once
// The loss on data that the run does not train on.

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "quern/run.h"
#include "run/hooks/hook.h"

namespace quern {

/// The loss over the next `tokens` tokens of `source`, which then stands where it stood. Empty when `interrupted`,
/// asked before each batch, became true. Ranks take batches round-robin, and their sums are added up in the order of
/// the batches: the same for any number of ranks. Null: there is one.
std::optional<DataLoss> sum_losses(Engine& engine, Ranks* ranks, DataSource& source, std::int64_t tokens,
                                   const std::function<bool()>& interrupted);

/// The validation split every train.eval_every steps, and at the end.
class Evaluation final : public Hook {
 public:
  /// `data` is null where there is no such split.
  void open(std::unique_ptr<DataSource> data) { data_ = std::move(data); }
  /// The run resumes at a checkpoint that was saved before its evaluation was done.
  void make_up_for(std::int64_t step) { cut_at_ = step; }
  /// Makes up for an evaluation that was cut short, where its step is not the last one.
  void begin(const RunState& state);
  void between_steps(const RunState& state) override;
  void rolled_back(const RunState&) override { evaluated_ = -1; }
  /// Evaluates, unless that was done at this step.
  void finish(const RunState& state);

  /// False: the evaluation due at this step is not made, or not to its end.
  bool done(const RunState& state) const { return !due(state) || evaluated_ == state.step; }
  double last_loss() const { return last_loss_; }  ///< NaN: none

 private:
  bool due(const RunState& state) const;
  void evaluate(const RunState& state);

  std::unique_ptr<DataSource> data_;
  std::int64_t evaluated_ = -1, cut_at_ = -1;  // steps
  double last_loss_ = std::numeric_limits<double>::quiet_NaN();
};

}  // namespace quern
