#pragma once
// What changed since a checkpoint was written: settings, the libraries that compute, and what the device does. A
// resumed run reports it, since one with, say, another rope_theta fits the checkpoint's shapes and yet is another
// model, and other algorithms give other last bits.

#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "plugin/plugin_host.h"

namespace quern {

/// The only change from a config that cannot be read.
inline constexpr const char* kUnreadableConfig = "all of it: the earlier config cannot be read";

/// The config's values by key, as messages show them, without the sections that config_changes leaves out; empty where
/// it cannot be read.
std::map<std::string, std::string> settings_in(const std::string& config);

/// "train.steps = 12 (was 8)", sorted by key. Sections that leave the numbers alone (log, checkpoint, sample) are not
/// compared.
std::vector<std::string> config_changes(const std::string& before, const std::string& after);

/// Of two texts of Device::save_state, entries of the first that the second lacks or has changed: "threads = 4 (was
/// 2)". Long values are left out, and all but the first few entries counted. Empty when nothing changed, or when one is
/// no JSON object.
std::string device_changes(const std::string& before, const std::string& after);

/// quern and the plugins that are loaded, with the checksums that their files have now.
std::vector<LibraryIdentity> libraries_in_use(const PluginHost& host);

/// "plugin llama = 1.1, file 0123456789abcdef (was 1.0, file 456789abcdef0123)", of those that both have: which are
/// selected is for the config to say.
std::vector<std::string> library_changes(const std::vector<LibraryIdentity>& before,
                                         const std::vector<LibraryIdentity>& after);

}  // namespace quern
