#pragma once
// The built-in optimizers, each in a source of its name, and several of them as one.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "quern/plugin.h"

namespace quern {

void add_adamw(Manifest& manifest);
void add_lion(Manifest& manifest);
void add_muon(Manifest& manifest);
void add_schedule_free(Manifest& manifest);
void add_sgd(Manifest& manifest);

/// For the plugin host.
std::vector<Factory> optimizer_factories();

/// The run's, which has the id, for all parameters but those whose ParameterSpec::optimizer is the id of another.
std::unique_ptr<Optimizer> by_groups(std::string id, std::unique_ptr<Optimizer> run,
                                     std::vector<std::pair<std::string, std::unique_ptr<Optimizer>>> others);

}  // namespace quern
