#pragma once
// JSON from files that others wrote: valid UTF-8, no name twice, nested no deeper than its format needs.

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace quern {

/// Parses the whole of `text`; an input error naming `where` otherwise.
nlohmann::json parse_strict_json(const std::string& where, std::string_view text, int largest_depth);

}  // namespace quern
