#pragma once
// Where time goes while something is done in phases, such as the start of a run.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace quern {

class Phases {
 public:
  /// The phase under way ends, and this one begins; one that was there before goes on.
  void enter(std::string_view phase);
  /// The phase under way ends, and none begins.
  void leave();
  /// So many seconds of the phase under way were another one's.
  void split(std::string_view phase, double seconds);

  /// Names and seconds, in the order in which they came; the one under way as far as it was when another began.
  const std::vector<std::pair<std::string, double>>& all() const { return all_; }
  double total() const;
  /// "12.3s: plan 0.1, kernels 8.1"
  std::string text() const;

 private:
  double& seconds_of(std::string_view phase);

  std::vector<std::pair<std::string, double>> all_;
  std::string current_;  // empty: none
  double since_ = 0;
};

}  // namespace quern
