#pragma once
// Which fields of a config.json say nothing about the model, for the run to name them.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace quern {

/// Top-level fields of the config.json at `path` (or in that folder) that `honoured`, the config.json that the model
/// writes, does not have. Left out are null and what every config.json carries: architectures, dtype, ids of tokens.
std::vector<std::string> ignored_hf_keys(const std::filesystem::path& path, std::string_view honoured);

}  // namespace quern
