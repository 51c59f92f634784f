#pragma once
// Which of a run's ranks this process is, as the program that started it says: quern itself, torchrun, mpirun or srun.

#include <functional>
#include <optional>
#include <string>

namespace quern {

inline constexpr int kMostRanks = 65536;

struct RankPlace {
  int rank = 0;
  int size = 1;
  int local_rank = 0;       ///< among the ranks of this machine
  int local_size = 1;       ///< at least so many ranks are on this machine
  std::string source = {};  ///< "quern", "torchrun", "mpirun" or "srun"
  std::string launch = {};  ///< equal for the ranks of one start, and no other's: letters, digits, '-'; may be empty
};

/// The value of an environment variable; null: not set.
using Environment = std::function<const char*(const char* name)>;

/// None: nobody started this process as a rank. quern's own variables go before torchrun's, mpirun's and srun's. Throws
/// a config error that names a variable which is missing or has no place in a group.
std::optional<RankPlace> rank_place(const Environment& environment);
std::optional<RankPlace> rank_place();

}  // namespace quern
