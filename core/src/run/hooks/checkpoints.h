#pragma once
// When a run saves, what it writes beside its tensors, and which checkpoint it rolls back to.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_saver.h"
#include "checkpoint/checkpoint_store.h"
#include "run/hooks/evaluation.h"
#include "run/hooks/hook.h"
#include "run/ranks/ranks.h"

namespace quern {

class Checkpoints final : public Hook {
 public:
  /// All arguments outlive this. `libraries` are those that compute. All ranks call alike, and each saves its part.
  Checkpoints(const Session& session, Engine& engine, Ranks& ranks, std::optional<RunLock>& lock,
              const std::vector<LibraryIdentity>& libraries, const Evaluation& evaluation);

  void between_steps(const RunState& state) override;
  /// Starts to save, and logs what is saved.
  void save(const RunState& state);
  /// Awaits the write under way, and logs what is saved.
  void finish(const RunState& state);
  void log_saved(const RunState& state);

  // ---- before the run fails, when nothing is to be logged yet ----
  void start_saving(const RunState& state);
  void wait();

  /// The run begins at a checkpoint.
  void begin_at(std::int64_t step) { last_saved_ = step; }
  /// Whether the run's step is saved, or is being saved.
  bool has(const RunState& state) const { return last_saved_ == state.step; }
  /// Whether a save did not succeed.
  bool failed() const { return saver_.failed(); }

  /// The newest whole one. When no step went well since the last time, the checkpoint itself may be what is wrong, and
  /// an older one is taken where there is one. An input error when there is none.
  Checkpoint to_roll_back_to(const RunState& state);
  void rolled_back(const RunState& state) override { rolled_back_to_ = last_saved_ = state.step; }

 private:
  std::string path_to_roll_back_to(const RunState& state);

  Ranks& ranks_;
  std::optional<RunLock>& lock_;
  const std::vector<LibraryIdentity>& libraries_;
  const Evaluation& evaluation_;
  class Saving;
  std::unique_ptr<SavingRanks> saving_;
  CheckpointSaver saver_;
  std::int64_t last_saved_ = -1;
  std::int64_t rolled_back_to_ = -1;  // no step went well since, while the run stands there
};

}  // namespace quern
