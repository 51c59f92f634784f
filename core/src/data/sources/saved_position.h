#pragma once
// A saved position in token files as text: "token-file-2 key=value key=value ...". It names the data and their order as
// well as the place, so that a checkpoint never continues on other data. The number names the rule (OrderRule) by
// which places become windows, so that a run goes on in the order that it began with.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "data/sources/window_order.h"

namespace quern {

/// "token-file-2"
std::string position_name(OrderRule rule);

class SavedPosition {
 public:
  /// Text of another form is an input error at `where`.
  SavedPosition(std::string where, const std::string& text);

  /// Refuses, with an input error, any difference in `now`: the files (`paths` names them for the message), the
  /// sequence, order, weights, documents and, when `seeded`, the seed.
  void require_same(const SavedPosition& now, const std::vector<std::string>& paths, bool seeded) const;
  /// An input error when it is missing or not below `below`.
  std::uint64_t number(const std::string& key, std::uint64_t below) const;

  OrderRule rule() const { return rule_; }

 private:
  const std::string& at(const std::string& key) const;

  std::string where_;
  OrderRule rule_ = OrderRule::second;
  std::map<std::string, std::string> fields_;
};

}  // namespace quern
