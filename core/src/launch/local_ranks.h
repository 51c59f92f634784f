#pragma once
// The processes of a run that quern starts by itself, all on this machine.

#include <string>
#include <vector>

#include "launch/supervisor.h"

namespace quern {

/// `size` processes of the program that runs now, with these arguments, which find themselves by rank_place(). Only
/// rank 0's standard output is seen.
std::vector<RankProcess> local_ranks(int size, const std::vector<std::string>& arguments);

/// Process id of the quern that started this process as a rank; 0: none did. It forwards signals, so that those which
/// come from elsewhere (a terminal's, to all processes at once) are to be ignored.
int starter_of_this_rank();

/// "rank 2: ", before messages of this process, where several write to one terminal. Ranks that quern started are named
/// by what started them: "".
std::string rank_prefix();

}  // namespace quern
