#pragma once
// JSON files that others wrote.

#include <cstddef>
#include <string>

#include <nlohmann/json.hpp>

namespace quern {

/// Reads a file of at most `largest_bytes` and parses it as parse_strict_json does; an input error otherwise.
nlohmann::json read_strict_json(const std::string& path, std::size_t largest_bytes, int largest_depth);

}  // namespace quern
