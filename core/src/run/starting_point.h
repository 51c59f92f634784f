#pragma once
// Where a run begins: at the newest checkpoint of its directory, at a Hugging Face model, or at random weights.

#include <string>
#include <vector>

#include "checkpoint/checkpoint_store.h"
#include "engine/engine.h"
#include "run/ranks/ranks.h"
#include "run/session.h"
#include "run/weights.h"

namespace quern {

struct StartingPoint {
  std::vector<std::string> removed;  ///< what a crash left in the run directory
  NewestCheckpoint newest;           ///< without a checkpoint: the run begins anew
  bool elsewhere = false;            ///< the checkpoint is checkpoint.from, not one of the run's own
};

/// Removes what a crash left, and opens the checkpoint to go on from. Collective; rank 0, which holds the RunLock, says
/// which. What would lose an earlier run, and a directory that cannot be saved to, is refused.
StartingPoint find_starting_point(const Session& session, Ranks& ranks);

/// Reads the checkpoint's state into the engine, whose working copies all ranks make together. The notes on
/// it are returned: changes since it was written.
std::vector<std::string> load_checkpoint(const Session& session, Engine& engine, const Checkpoint& checkpoint,
                                         const std::vector<LibraryIdentity>& libraries, Ranks& ranks);

/// The files and the seed that a run's first weights come from.
FirstWeights::From first_weights_of(const Session& session);
/// What a run knows of its weights once they are there.
struct LoadedWeights {
  std::vector<std::string> notes = {};
  std::string frozen = {};  ///< checksum of the frozen ones; empty: none
};
/// Weights of a run that begins anew; or of one that goes on the frozen ones, which no checkpoint has.
LoadedWeights load_first_weights(const Session& session, Engine& engine, Ranks& ranks);
LoadedWeights load_frozen_weights(const Session& session, Engine& engine);

}  // namespace quern
