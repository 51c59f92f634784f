#pragma once
// "~" at the beginning of a path that no shell has read: in a config, or behind "--option=".

#include <string>

namespace quern {

/// "~" and "~/a" with the home directory of this user, "~name" and "~name/a" with another's, as a shell reads
/// them. Any other text, and one whose user or home is unknown, is returned as it is.
std::string expand_home(const std::string& path);

}  // namespace quern
