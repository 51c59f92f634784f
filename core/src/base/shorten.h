#pragma once
// Untrusted text in messages: cut where it would fill the screen.

#include <string>

namespace quern {

/// At most about 80 bytes, whole UTF-8 characters, "..." where something was cut.
std::string shortened(std::string text);

}  // namespace quern
