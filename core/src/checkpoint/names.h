#pragma once
// Names out of untrusted files, made fit for messages and checked before they become paths.

#include <string>
#include <string_view>
#include <vector>

namespace quern {

/// Control characters and bytes that are no UTF-8 become '?'; cut to `longest` bytes with "..." where it is longer.
std::string printable(std::string_view text, std::size_t longest = 120);
/// printable, in quotes.
std::string quote_name(std::string_view name);
/// The first eight, "'a', 'b' and 3 more".
std::string list_names(const std::vector<std::string>& names);

/// A name of a file inside a directory: not empty, printable, no '/', not "." or "..".
bool is_plain_file_name(std::string_view name);

}  // namespace quern
