#pragma once
// The checkpoints of a run: which is the newest whole one, which go. What a crash left behind is passed over or
// removed. One process at a time may write to a run directory; it holds the RunLock.

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/files/held_directory.h"
#include "checkpoint/checkpoint.h"

namespace quern {

/// A directory that was passed over, and why.
struct SkippedCheckpoint {
  std::string path;
  std::string reason;  ///< without a next step
};

struct NewestCheckpoint {
  std::optional<Checkpoint> checkpoint;    ///< empty: the run has none that is whole
  std::vector<SkippedCheckpoint> skipped;  ///< newer ones that are damaged, and unfinished ones
  std::vector<std::string> strangers;      ///< entries that no run writes there; not touched
};

/// Opens the whole checkpoint with the highest step, of those below `before`. A run directory without checkpoints is
/// not an error.
NewestCheckpoint find_newest(const std::string& run_directory,
                             std::int64_t before = std::numeric_limits<std::int64_t>::max());

/// Opens the checkpoint at `path`, or the newest whole one of the run directory there; an input error where there is
/// none. Appends a line to `notes` for each that was passed over.
Checkpoint checkpoint_at(const std::string& path, std::vector<std::string>& notes);

/// Throws an input error: none of those in the run directory `path` is whole, which `found` has found.
[[noreturn]] void fail_without_checkpoint(const std::string& path, const NewestCheckpoint& found);

/// What a failed run has kept and how it goes on: "step 4 is saved, and the same command continues from there". Of
/// checkpoints' files it looks at the sizes alone. `resume`: checkpoint.resume.
std::string how_to_continue(const std::string& run_directory, const std::string& resume);

/// Which checkpoints stay.
struct Retention {
  std::int64_t keep_last = 0;   ///< so many of the newest; 0: all
  std::int64_t keep_every = 0;  ///< and checkpoints of steps that are multiples of this, the major ones; 0: none
};

/// Keeps the newest checkpoints up to and including `newest_step`, which was just written, and major ones; removes
/// others. Damaged ones do not count. Only those with the parameters of that checkpoint are counted and removed: one of
/// another model, or whose parameters cannot be read, is not touched, and so is one of a later step, of a run that was
/// wound back. Returns the paths removed.
std::vector<std::string> remove_old_checkpoints(const std::string& run_directory, const Retention& retention,
                                                std::int64_t newest_step);

/// Proves, by writing, that checkpoints and an export can be saved; a resources error otherwise.
void check_can_save(const std::string& run_directory);

/// Removes what an earlier crash left unfinished, checkpoints and exports; returns the paths. Only for the holder of
/// the RunLock.
std::vector<std::string> remove_leftovers(const std::string& run_directory);

/// The right to write into a directory, for the life of this object: flock on the directory itself and on
/// <directory>/.lock. The system takes it back when the process dies.
class RunLock {
 public:
  /// Creates the directory if need be. A resources error when another process, or this one, holds the lock; `advice` is
  /// what its user can do then.
  explicit RunLock(std::string directory, std::string advice = "wait for it, or choose another log.directory");
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  /// Where the directory is now; nothing is to be written anywhere else. One that was moved is followed. One that was
  /// removed is created anew and locked; that throws like the constructor.
  std::string directory();
  /// The same, to write into while it may be moved.
  HeldDirectory hold();
  /// What the directory's lock file says of its holder, for other processes to compare; "": there is no such file.
  static std::string holder_in(const std::string& directory);

 private:
  void take();
  void release();
  [[noreturn]] void refuse(int reason) const;

  std::string asked_, advice_;
  int folder_ = -1, file_ = -1;
};

}  // namespace quern
