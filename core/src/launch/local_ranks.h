#pragma once
// The processes of a run that quern starts by itself, all on this machine.

#include <string>
#include <vector>

#include "launch/supervisor.h"

namespace quern {

/// `size` processes of a program with its arguments, which find themselves by rank_place(). Only rank 0's standard
/// output is seen.
std::vector<RankProcess> local_ranks(int size, const std::vector<std::string>& words);
/// The program that runs now: by its name, which `ps` shows, unless the file was replaced.
std::string this_program();

/// "rank 2: ", before messages of this process, where several write to one terminal. Ranks that quern started are named
/// by what started them: "".
std::string rank_prefix();
/// "rank 2: text", once where the text begins so.
std::string said_by(const std::string& name, const std::string& text);

}  // namespace quern
