#pragma once
// A process as the one that starts a run's ranks, or as a rank that quern, torchrun, mpirun or srun started.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launch/rank_place.h"
#include "quern/run.h"

namespace quern {

/// What a rank that somebody started takes from its place: how many ranks there are, when the config does not say; the
/// console is no terminal under mpirun; a rank that was restarted continues. Throws a config error when the config asks
/// for another number.
void take_place(const RankPlace& place, RunConfig& run);

/// When the config asks for several ranks or for restarts: runs the program `words` as all ranks, again after a failure
/// as often as parallel.restarts allows, and returns the exit code. None: this process does the work. `say` gets lines
/// for standard error: warnings, and the cause of a failure. A config error where there are no words.
std::optional<int> start_ranks(const RunConfig& run, const std::vector<std::string>& words,
                               const std::function<void(const std::string&)>& say);

}  // namespace quern
