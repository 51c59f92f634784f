#pragma once
// Names out of untrusted files: listed in messages, and checked before they become paths.

#include <string>
#include <string_view>
#include <vector>

namespace quern {

/// The first eight, "'a', 'b' and 3 more".
std::string list_names(const std::vector<std::string>& names);

/// A name of a file inside a directory: not empty, printable, no '/', not "." or "..".
bool is_plain_file_name(std::string_view name);

}  // namespace quern
