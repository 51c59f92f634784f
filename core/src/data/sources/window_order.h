#pragma once
// The order in which a run sees the windows of its files: any place of any pass is computed on its own, so a position
// is one number and a resumed run needs no history.
//
// Windows come in groups, the entries of the config's list. Without weights there is one group, and a pass is each of
// its windows once. With weights a pass has as many windows as all groups together, shared out by weight; a group that
// gives fewer than it has goes on with its next ones in the next pass, one that gives more begins again, so that no
// window of a group is seen twice more often than another.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace quern {

class WindowOrder {
 public:
  /// `weights`: one a group, or none. A group that a pass would take nothing of is a config error at `where`.
  WindowOrder(std::vector<std::uint64_t> windows, const std::vector<double>& weights, bool shuffled, std::uint64_t seed,
              const std::string& where);

  /// Of one pass.
  std::uint64_t windows() const { return begin_.back(); }
  /// How many of each group a pass takes; empty without weights.
  const std::vector<std::uint64_t>& shares() const { return shares_; }

  struct Window {
    std::size_t group;
    std::uint64_t index;  ///< among the group's
  };
  /// `place` counts on over all passes.
  Window at(std::uint64_t place) const;

 private:
  std::vector<std::uint64_t> windows_;  ///< that each group has
  std::vector<std::uint64_t> shares_;
  std::vector<std::uint64_t> begin_;  ///< of each group in a pass, and the end
  bool shuffled_;
  std::uint64_t seed_;
};

}  // namespace quern
