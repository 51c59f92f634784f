#pragma once
// What differs between two resolved configs: a resumed run tells it, since a continued run with, say, another
// rope_theta fits the checkpoint's shapes and yet is another model.

#include <string>
#include <vector>

namespace quern {

/// "train.steps = 12 (was 8)", sorted by key. Sections that leave the numbers alone (log, checkpoint) are not compared;
/// of an unreadable `before` nothing is told but that.
std::vector<std::string> config_changes(const std::string& before, const std::string& after);

}  // namespace quern
