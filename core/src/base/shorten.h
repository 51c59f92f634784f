#pragma once
// Untrusted text in messages: cut where it would fill the screen, and without what would steer a terminal.

#include <cstddef>
#include <string>
#include <string_view>

namespace quern {

/// At most about 80 bytes, whole UTF-8 characters, "..." where something was cut.
std::string shortened(std::string text);

/// At most about `most` bytes; the cut is in the middle, since a path's end tells most.
std::string bounded(std::string_view text, std::size_t most);

/// Control characters other than line ends, and bytes that are no UTF-8, become '?'.
std::string without_control(std::string_view text);

/// The same of line ends too, and cut to `longest` bytes with "..." where it is longer.
std::string printable(std::string_view text, std::size_t longest = 120);
/// printable, in quotes.
std::string quote_name(std::string_view name);

}  // namespace quern
