#pragma once
// What a resumed run does otherwise than before: its config, since a run with, say, another rope_theta fits the
// checkpoint's shapes and yet is another model; and what its device does, since other algorithms give other last bits.

#include <string>
#include <vector>

namespace quern {

/// "train.steps = 12 (was 8)", sorted by key. Sections that leave the numbers alone (log, checkpoint) are not compared;
/// of an unreadable `before` nothing is told but that.
std::vector<std::string> config_changes(const std::string& before, const std::string& after);

/// Of two texts of Device::save_state, what the first has and the second lacks or has otherwise: "threads = 4 (was 2)".
/// Long values are left out, and all but the first few entries counted. Empty when nothing changed, or when one is no
/// JSON object.
std::string device_changes(const std::string& before, const std::string& after);

}  // namespace quern
