#pragma once
// What planning asks of an optimizer about one parameter: its states, its ops, and how far the update can be cut.

#include <string>
#include <vector>

#include "quern/optimizer.h"

namespace quern {

struct UpdateTraits {
  std::vector<OptimizerState> states = {};
  std::vector<Op> ops = {};
  UpdateLocality locality = UpdateLocality::matrix;  ///< the widest of the ops'; matrix where a state has no rows
  std::vector<std::string> whole_kinds = {};         ///< of ops that need whole matrices, once each
  bool splits() const { return locality != UpdateLocality::matrix; }
};
UpdateTraits update_traits(const Optimizer& optimizer, const ParameterSpec& spec, const OpSet& ops);

/// A builder whose program has the values "update" and `step`.
UpdateBuilder update_builder(const OpSet& ops, const char* step);

}  // namespace quern
