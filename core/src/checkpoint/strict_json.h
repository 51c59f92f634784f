#pragma once
// JSON from files that others wrote: valid UTF-8, no name twice, nested no deeper than its format needs.

#include <cstddef>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace quern {

/// Parses the whole of `text`; an input error naming `where` otherwise.
nlohmann::json parse_strict_json(const std::string& where, std::string_view text, int largest_depth);

/// Reads and parses a file of at most `largest_bytes`.
nlohmann::json read_strict_json(const std::string& path, std::size_t largest_bytes, int largest_depth);

}  // namespace quern
