#pragma once
// How much host memory a process may still take.

#include <cstddef>
#include <optional>
#include <string>

namespace quern {

/// Bytes: the least of what the system has available and what the control groups of this process leave, versions 1 and
/// 2. Nothing where the system does not say. `root` is where its files are looked for.
std::optional<std::size_t> available_memory(const std::string& root = "");

}  // namespace quern
