#pragma once
// Plans for GPUs that are not here: which ones the device plugin knows (its option `assume`), by product names as
// people write them, and what fits on each.

#include <iosfwd>
#include <string>
#include <vector>

#include "quern/options.h"

namespace quern {

/// The option `assume` of the config's device, whose choices but "auto" are ids of GPUs. A config error when it has
/// none.
OptionSpec assumable_gpus(const std::string& config_file, const std::vector<std::string>& overrides);

/// The id that `name` means, given with the option `where` ("--gpu"): the id itself, a card's name, or words of it
/// that no other GPU has but its variants. "RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090" and "4090" are RTX-4090. A
/// config error with the nearest ids when it means none, or several alike.
std::string gpu_named(const std::string& where, const std::string& name, const OptionSpec& gpus);

/// GPUs of one machine; 0: as many as the config has ranks.
struct AssumedGpus {
  std::string id;
  int count = 0;
};
/// The same with a number before it: "4x RTX 4090".
AssumedGpus gpus_named(const std::string& where, const std::string& name, const OptionSpec& gpus);

/// Overrides with which the config is planned for that GPU, whose memory is the device budget unless the config has
/// one, and for so much host memory; "": not limited. A number of GPUs is the number of ranks, whose micro-batches are
/// made a multiple of it, and which copy from each other where the config has no communicator.
std::vector<std::string> assuming(const std::string& config_file, std::vector<std::string> overrides,
                                  const AssumedGpus& gpu, const std::string& host_memory);

/// One line a GPU, each written when it is known: whether the run fits, with which micro-batch and placements, and its
/// estimated speed. `overrides` by GPU are `assuming`'s.
void write_fit_table(std::ostream& out, const std::string& config_file,
                     const std::vector<std::vector<std::string>>& overrides);

}  // namespace quern
