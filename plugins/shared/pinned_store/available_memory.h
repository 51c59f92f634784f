#pragma once
// How much host memory a process may still take.

#include <cstddef>
#include <optional>
#include <string>

namespace quern {

/// Bytes: the least of the system's available memory and the room in this process's control groups, versions 1 and
/// 2. Nothing where the system does not say. `root` is where its files are looked for.
std::optional<std::size_t> available_memory(const std::string& root = "");

}  // namespace quern
