#pragma once
// Plans for GPUs that are not here: which ones the device plugin knows (its option `assume`), by product names as
// people write them, and what fits on each.

#include <string>
#include <vector>

namespace quern {

/// The ids that the option `assume` of the config's device takes, without "auto". A config error when it has none.
std::vector<std::string> assumable_gpus(const std::string& config_file, const std::vector<std::string>& overrides);

/// The id that `name` means: "RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090" and "4090" are RTX-4090. A config error
/// when it means none, or several alike.
std::string gpu_named(const std::string& name, const std::vector<std::string>& ids);

/// Overrides with which the config is planned for that GPU, whose memory is the device budget unless the config has
/// one, and for so much host memory; "": not limited.
std::vector<std::string> assuming(const std::string& config_file, std::vector<std::string> overrides,
                                  const std::string& gpu, const std::string& host_memory);

/// One line a GPU: whether the run fits, with which micro-batch and placements, and its estimated speed. `overrides` by
/// GPU are those of `assuming`.
std::string fit_table(const std::string& config_file, const std::vector<std::vector<std::string>>& overrides);

}  // namespace quern
