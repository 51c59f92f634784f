#pragma once
// Saves the state of a run: each rank's part is copied to its host while training stands still, and written behind it
// on a thread; then rank 0 completes the checkpoint and removes older ones. One write at a time; what a write fails
// with is thrown by the next call here.

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "base/files/durable_file.h"
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

/// The ranks of a run as its saver sees them; without overrides, one rank alone.
class SavingRanks {
 public:
  SavingRanks() = default;
  virtual ~SavingRanks() = default;
  SavingRanks(const SavingRanks&) = delete;
  SavingRanks& operator=(const SavingRanks&) = delete;

  virtual RankFile file() const { return {}; }
  /// Whether this rank's part is written; false: another rank has the same.
  virtual bool writes() const { return true; }
  /// What `make` gives on rank 0; collective.
  virtual std::string from_leader(const std::function<std::string()>& make) { return make(); }
  /// A message to rank 0, and there the next one of a rank; from any thread.
  virtual void post(const std::string& text) { static_cast<void>(text); }
  virtual std::string posted(int rank) { return std::to_string(rank); }
  /// While what it returns lives, the process may finish a write although another rank failed.
  virtual std::shared_ptr<void> hold() { return nullptr; }
};

class CheckpointSaver {
 public:
  /// Takes the plan's snapshot_bytes of pinned memory; without any, `save` writes before it returns, tensor by tensor.
  /// `lock` is rank 0's; elsewhere null. Arguments outlive the saver.
  CheckpointSaver(Device& device, Engine& engine, RunLock* lock, const Retention& retention, SavingRanks& ranks);
  /// Awaits the write under way; its failure is lost.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  /// Saves the engine's state, gathered, with `meta`, once the save before is done. Collective.
  void save(CheckpointMeta meta);
  /// Awaits the write under way.
  void wait();
  /// Whether a save did not succeed.
  bool failed() const { return failed_; }
  /// What became whole since the last call, on rank 0; does not wait.
  std::vector<SavedCheckpoint> take_saved();

 private:
  /// Where a checkpoint is written; on rank 0, which made it, with what puts it in place.
  struct Target {
    HeldDirectory run;
    std::unique_ptr<NewDirectory> made;
  };

  Target open_target(std::int64_t step);
  SavedCheckpoint write(Target& target, const CheckpointMeta& meta, const TensorReader& reader) const;
  void await_from(int first) const;
  void complete(NewDirectory& made, const CheckpointMeta& meta, const FileRecord& own) const;
  SavedCheckpoint write_from_device(Target& target, const CheckpointMeta& meta);

  Device& device_;
  Engine& engine_;
  RunLock* lock_;
  Retention retention_;
  SavingRanks& ranks_;
  std::vector<StatePart> state_;  ///< this rank's
  std::vector<NamedView> views_;  ///< of the snapshot, in the order of state_; without one, without data
  std::byte* snapshot_ = nullptr;
  std::vector<SavedCheckpoint> saved_;
  bool failed_ = false;
  std::future<SavedCheckpoint> writing_;  ///< last: its end is awaited before anything else goes
};

}  // namespace quern
