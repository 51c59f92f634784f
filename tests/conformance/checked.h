#pragma once
// Each plugin in broken/ has one fault, and the kit must name the contract that it breaks, with got and want. A few are
// sound, and easily taken for faulty: they say "No fault".

#include <string>
#include <vector>

#include "conformance/check.h"

namespace quern::conformance {

/// The file of a plugin of broken/.
std::string broken_plugin(const std::string& kind, const std::string& id);

/// `only`: parts of contracts' names; empty: all contracts.
Report checked(const std::string& kind, const std::string& id, const std::vector<std::string>& only = {});
Report checked_with(const std::string& kind, const std::string& id, const std::vector<std::string>& settings,
                    const std::vector<std::string>& only = {});

/// Exactly these contracts are broken, of all or of `only`, and the first says all of `parts`.
void check_broken(const std::string& kind, const std::string& id, const std::vector<std::string>& contracts,
                  const std::vector<std::string>& parts, const std::vector<std::string>& only = {});

/// Exactly this contract of the plugin is broken with this setting, and says so.
void check_setting(const std::string& kind, const std::string& id, const std::string& setting,
                   const std::string& contract, const std::string& part);

/// All contracts hold.
void check_sound(const Report& report);

}  // namespace quern::conformance
