#include "checkpoint/changes.h"

#include <algorithm>
#include <map>
#include <span>

#include <nlohmann/json.hpp>

#include "base/checksum.h"
#include "base/files/input_file.h"
#include "base/shorten.h"
#include "config/document.h"
#include "quern/error.h"

namespace quern {

namespace {

using Settings = std::map<std::string, std::string>;  // full key -> value as messages show it

void collect(const ConfigNode& node, const std::string& key, Settings& settings) {
  if (key == "log" || key == "checkpoint" || key == "sample") return;
  for (std::size_t i = 0; i < node.items.size(); ++i)
    collect(node.items[i], key + "." + std::to_string(i + 1), settings);
  if (!node.items.empty()) return;
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

// Scalars of a JSON object by their path. Deeper than a device writes, nothing is looked at: the text is untrusted.
void collect(const nlohmann::json& node, const std::string& path, int depth, Settings& settings) {
  if (!node.is_structured()) {
    settings[path] = node.is_string() ? node.get<std::string>() : node.dump();
    return;
  }
  if (!node.is_object() || depth == 0) return;
  for (const auto& [name, child] : node.items())
    collect(child, path.empty() ? name : path + ": " + name, depth - 1, settings);
}

std::string change_of(const std::string& name, const std::string& was, const std::string& is) {
  constexpr std::size_t kLongest = 40;  // a GPU's algorithm has 128 digits
  if (was.size() > kLongest || is.size() > kLongest) return shortened(name);
  return shortened(name) + " = " + is + " (was " + was + ")";
}

std::vector<std::string> differences(const Settings& old, const Settings& now) {
  std::vector<std::string> changes;
  Settings all = now;
  all.insert(old.begin(), old.end());
  for (const auto& [key, ignored] : all) {
    auto was = old.find(key), is = now.find(key);
    const std::string name = printable(key);
    if (is == now.end())
      changes.push_back(name + " is not set (was " + printable(was->second) + ")");
    else if (was == old.end())
      changes.push_back(name + " = " + printable(is->second) + " (was not set)");
    else if (is->second != was->second)
      changes.push_back(name + " = " + printable(is->second) + " (was " + printable(was->second) + ")");
  }
  return changes;
}

LibraryIdentity identity_of(const std::string& name, const std::string& version, const std::string& path) try {
  Checksum sum;
  InputFile(path).for_each_piece(0, [&](std::span<const std::byte> piece) {
    sum.add(piece);
    return true;
  });
  return {name, version, checksum_text(sum.value())};
} catch (const Error& error) {
  if (error.code() != ErrorCode::input) throw;
  return {name, version, "unreadable"};  // loaded, and gone since
}

Settings settings_of(const std::vector<LibraryIdentity>& libraries) {
  Settings settings;
  for (const LibraryIdentity& library : libraries)
    settings[library.name] += (settings[library.name].empty() ? "" : " and ") + library.version +
                              (library.hash.empty() ? "" : ", file " + library.hash);
  return settings;
}

}  // namespace

std::map<std::string, std::string> settings_in(const std::string& config) try {
  return settings_of(config);
} catch (const Error&) {
  return {};
}

std::vector<std::string> config_changes(const std::string& before, const std::string& after) {
  Settings old;
  try {
    old = settings_of(before);
  } catch (const Error&) {
    return {kUnreadableConfig};
  }
  return differences(old, settings_of(after));
}

std::vector<LibraryIdentity> libraries_in_use(const PluginHost& host) {
  std::vector<LibraryIdentity> libraries{identity_of("quern", QUERN_VERSION, PluginHost::core_library())};
  for (const auto& plugin : host.loaded())
    libraries.push_back(identity_of("plugin " + plugin->name, plugin->version, plugin->path));
  return libraries;
}

std::vector<std::string> library_changes(const std::vector<LibraryIdentity>& before,
                                         const std::vector<LibraryIdentity>& after) {
  Settings was = settings_of(before), is = settings_of(after);
  std::erase_if(was, [&](const auto& library) { return !is.contains(library.first); });
  std::erase_if(is, [&](const auto& library) { return !was.contains(library.first); });
  return differences(was, is);
}

std::string device_changes(const std::string& before, const std::string& after) {
  using nlohmann::json;
  constexpr int kDepth = 3;
  constexpr std::size_t kNamed = 5;
  const json old = json::parse(before, nullptr, false), now = json::parse(after, nullptr, false);
  if (!old.is_object() || !now.is_object()) return {};
  std::vector<std::string> changes;
  for (const auto& [group, entries] : old.items()) {
    auto here = now.find(group);
    if (here == now.end()) {
      changes.push_back("none of \"" + shortened(group) + "\" is kept");
      continue;
    }
    Settings then, is;
    collect(entries, entries.is_object() ? "" : group, kDepth, then);
    collect(*here, here->is_object() ? "" : group, kDepth, is);
    for (const auto& [name, was] : then)
      if (auto found = is.find(name); found == is.end() || found->second != was)
        changes.push_back(change_of(name, was, found == is.end() ? "none" : found->second));
  }
  std::string text;
  for (std::size_t i = 0; i < std::min(changes.size(), kNamed); ++i) text += (i > 0 ? "; " : "") + changes[i];
  if (changes.size() > kNamed) text += "; and " + std::to_string(changes.size() - kNamed) + " more";
  return without_control(text);
}

}  // namespace quern
