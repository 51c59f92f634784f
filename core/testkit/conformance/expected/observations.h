#pragma once
// What an implementation does, as a few names with numbers or a text: what an author can state as meant.

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "conformance/subject.h"

namespace quern::conformance {

/// Of a tensor: its root mean square and its component along a random direction, which sees order and sign; a few
/// numbers stand for themselves.
using Observed = std::map<std::string, std::variant<std::vector<double>, std::string>>;

struct Observer {
  Observed (*observe)(const Subject&) = nullptr;  ///< null: the kit observes nothing of this kind
  /// Relative to an entry's largest number: what sums in another order may do.
  double tolerance = 0;
};

Observer observer_of(const std::string& kind);

}  // namespace quern::conformance
