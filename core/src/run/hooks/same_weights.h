#pragma once
// Finds corruption that nothing else notices: every parallel.check_every steps the ranks compare checksums of the
// weights that all of them have, and ranks with the same shards on several machines checksums of their shards.

#include <string>
#include <vector>

#include "run/hooks/hook.h"

namespace quern {

/// Which ranks are wrong, where what each rank has is not the same: "rank 2", those that differ from more than half of
/// all; else all of them, "ranks 0, 1". Empty: none. `all` is of the ranks `first`, `first + step` and so on.
std::string ranks_that_differ(const std::vector<std::string>& all, int first, int step);

class SameWeights final : public Hook {
 public:
  /// Collective. Reads all compute weights to the host, in slices. Throws a communication error that names the ranks.
  void between_steps(const RunState& state) override;
};

}  // namespace quern
