#include "train/config_changes.h"

#include <map>

#include "config/document.h"
#include "quern/error.h"

namespace quern {

namespace {

using Settings = std::map<std::string, std::string>;  // full key -> value as messages show it

void collect(const ConfigNode& node, const std::string& key, Settings& settings) {
  if (key == "log" || key == "checkpoint" || key == "sample") return;
  if (!node.is_table) {
    settings[key] = node.value ? to_string(*node.value) : node.found;
    return;
  }
  for (const auto& [name, child] : node.children) collect(child, key.empty() ? name : key + "." + name, settings);
}

Settings settings_of(const std::string& text) {
  Settings settings;
  collect(ConfigDocument::parse(text, "config").root(), "", settings);
  return settings;
}

}  // namespace

std::vector<std::string> config_changes(const std::string& before, const std::string& after) {
  Settings old, now = settings_of(after);
  try {
    old = settings_of(before);
  } catch (const Error&) {
    return {"all of it: the earlier config cannot be read"};
  }
  std::vector<std::string> changes;
  Settings all = now;
  all.insert(old.begin(), old.end());
  for (const auto& [key, ignored] : all) {
    auto was = old.find(key), is = now.find(key);
    if (is == now.end())
      changes.push_back(key + " is not set (was " + was->second + ")");
    else if (was == old.end())
      changes.push_back(key + " = " + is->second + " (was not set)");
    else if (is->second != was->second)
      changes.push_back(key + " = " + is->second + " (was " + was->second + ")");
  }
  return changes;
}

}  // namespace quern
