#pragma once
// Optimizers with settings that change their programs.

#include <memory>
#include <string>
#include <vector>

#include "end_to_end.h"
#include "plugin/plugin_host.h"
#include "quern/optimizer.h"

namespace quern::testing {

struct Recipe {
  std::string id;
  std::vector<std::string> settings = {};  ///< "key=value"
  /// As overrides of a run's config.
  Overrides overrides() const {
    Overrides all{"optimizer.id=" + id};
    for (const std::string& setting : settings) all.push_back("optimizer." + id + "." + setting);
    return all;
  }
  std::unique_ptr<Optimizer> made(PluginHost& host) const {
    const std::vector<OptionSpec>& specs = host.require("optimizer", id).options;
    OptionValues values = default_values(specs);
    for (const std::string& setting : settings) {
      const std::string key = setting.substr(0, setting.find('=')), text = setting.substr(key.size() + 1);
      const OptionValue& known = *values.find(key);
      if (std::holds_alternative<bool>(known))
        values.set(key, text == "true");
      else if (std::holds_alternative<std::int64_t>(known))
        values.set(key, std::int64_t{std::stoll(text)});
      else
        values.set(key, text);
    }
    return host.create<Optimizer>(id, values);
  }
};

inline const Recipe kRecipes[] = {{"adamw"},
                                  {"adamw", {"moments=bf16", "moment2=fp32"}},
                                  {"adamw", {"moments=int8"}},
                                  {"adamw", {"moment1=e4m3", "moment2=int8", "block=256"}},
                                  {"sgd", {"nesterov=true"}},
                                  {"lion", {"moments=bf16"}},
                                  {"schedule_free"},
                                  {"muon"},
                                  {"muon", {"moments=bf16", "step_size=original", "split=heads"}},
                                  {"muon", {"normalize=rows", "split=head_groups"}}};

}  // namespace quern::testing
