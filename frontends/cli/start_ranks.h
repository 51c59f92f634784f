#pragma once
// A command that several ranks do together.

#include <optional>

#include "commands.h"
#include "launch/rank_place.h"
#include "run/session.h"

namespace quern::cli {

/// take_place() of run/ranks/start_ranks.h; only rank 0 has a console.
void take_place(const RankPlace& place, RunArguments& run);

/// start_ranks() of this command with its arguments. None: this process does the work.
std::optional<int> start_ranks(const RunArguments& run, Arguments command, const Arguments& arguments);

/// Throws a config error, with `what` in it, where the run has one rank.
void need_several_ranks(const Session& session, const std::string& what);

}  // namespace quern::cli
