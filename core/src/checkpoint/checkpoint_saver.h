#pragma once
// Saves the state of a run: copied to the host while training stands still, written and thinned out behind it on a
// thread. One write at a time; what a write fails with is thrown by the next call here.

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_store.h"
#include "engine/engine.h"

namespace quern {

/// A checkpoint that is whole under its name.
struct SavedCheckpoint {
  std::int64_t step = 0;
  std::string path;
  double held = 0;     ///< seconds that training stood still for it
  double seconds = 0;  ///< from the call of `save` to its end
};

class CheckpointSaver {
 public:
  /// What it returns lives as long as a write.
  using Hold = std::function<std::shared_ptr<void>()>;
  /// Takes the plan's snapshot_bytes of pinned memory; without any, `save` writes before it returns, tensor by tensor.
  /// `hold` is called when a copy is whole, so that its write needs nobody else. Arguments outlive the saver.
  CheckpointSaver(Device& device, Engine& engine, RunLock& lock, const Retention& retention, Hold hold);
  /// Awaits the write under way; its failure is lost.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  /// Saves the engine's state with `meta`, once the save before is done.
  void save(CheckpointMeta meta);
  /// Awaits the write under way.
  void wait();
  /// Whether a save did not succeed.
  bool failed() const { return failed_; }
  /// What became whole since the last call; does not wait.
  std::vector<SavedCheckpoint> take_saved();

 private:
  SavedCheckpoint write(const HeldDirectory& run, const CheckpointMeta& meta, const TensorReader& reader) const;
  SavedCheckpoint write_from_device(const HeldDirectory& run, const CheckpointMeta& meta);

  Device& device_;
  Engine& engine_;
  RunLock& lock_;
  Retention retention_;
  Hold hold_;
  std::vector<PlannedTensor> state_;
  std::vector<NamedView> views_;  ///< of the snapshot, in the order of state_; without one, without data
  std::byte* snapshot_ = nullptr;
  std::vector<SavedCheckpoint> saved_;
  bool failed_ = false;
  std::future<SavedCheckpoint> writing_;  ///< last: its end is awaited before anything else goes
};

}  // namespace quern
