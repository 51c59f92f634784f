#pragma once
// The order in which a run sees the windows of its files: any place of any pass is computed on its own, so a position
// is one number and a resumed run needs no history.
//
// Windows come in groups, the entries of the config's list. Without weights there is one group, and a pass is each of
// its windows once. With weights a pass has as many windows as all groups together, shared out by weight: what rounding
// takes from a group in one pass it gets in a later one. A group that gives fewer than it has goes on with its next
// ones in the next pass, one that gives more begins again, so that no window of a group is seen twice more often than
// another.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace quern {

/// How places become windows. A run keeps the rule that it began with, over all its checkpoints.
enum class OrderRule : std::uint8_t {
  first = 1,  ///< shares of a pass are rounded once for all passes; some orders of few windows are more likely
  second,     ///< rounding is carried over, and every order of up to 256 windows is equally likely
};

class WindowOrder {
 public:
  /// `weights`: one a group, or none. A group that would get less than half a window in a pass is a config error at
  /// `where`.
  WindowOrder(std::vector<std::uint64_t> windows, const std::vector<double>& weights, bool shuffled, std::uint64_t seed,
              const std::string& where, OrderRule rule = OrderRule::second);

  /// Of one pass.
  std::uint64_t windows() const { return total_; }
  OrderRule rule() const { return rule_; }
  /// Windows that a pass takes of each group, on average; empty without weights.
  std::vector<double> shares() const;

  struct Window {
    std::size_t group;
    std::uint64_t index;  ///< among the group's
  };
  /// `place` counts on over all passes.
  Window at(std::uint64_t place) const;

 private:
  /// Of a group: whole windows a pass, and 2^-32 ths of one.
  struct Share {
    std::uint64_t whole = 0, fraction = 0;
  };
  /// Windows of the group that so many passes take.
  std::uint64_t taken(std::size_t group, std::uint64_t passes) const;
  std::uint64_t permute(std::uint64_t index, std::uint64_t count, std::uint64_t seed, std::uint64_t round) const;

  std::vector<std::uint64_t> windows_;  ///< that each group has
  std::uint64_t total_;
  std::vector<Share> shares_;  ///< empty: one group, each window once
  std::size_t largest_ = 0;    ///< the group that takes what the others leave of a pass
  bool even_ = true;           ///< every pass takes the same of each group
  bool shuffled_;
  std::uint64_t seed_;
  OrderRule rule_;
};

}  // namespace quern
