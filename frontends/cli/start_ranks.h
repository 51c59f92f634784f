#pragma once
// A command as the one that starts a run's ranks, or as a rank that torchrun, mpirun or srun started.

#include <optional>

#include "commands.h"
#include "launch/rank_place.h"
#include "run/session.h"

namespace quern::cli {

/// What a rank that somebody started takes from its place: how many ranks there are, when the config does not say; only
/// rank 0 has a console, which is no terminal under mpirun. Throws a config error when the config asks for another
/// number.
void take_place(const RankPlace& place, RunArguments& run);

/// When the config asks for several ranks or for restarts: runs quern with this command and its arguments as
/// all ranks, again after a failure as often as parallel.restarts allows, prints the cause of a failure and returns the
/// exit code. None: this process does the work.
std::optional<int> start_ranks(const RunArguments& run, Arguments command, const Arguments& arguments);

/// Throws a config error, with `what` in it, where the run has one rank.
void need_several_ranks(const Session& session, const std::string& what);

}  // namespace quern::cli
