#pragma once
// From a document to values: every section and key is checked against the schemas and the selected plugins' own
// options, and all faults are reported together.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "config/document.h"
#include "config/schema.h"
#include "plugin/plugin_host.h"

namespace quern {

class ResolvedConfig {
 public:
  /// The section's own keys, defaults filled in, `id` and `path` included. An unknown section is an internal error.
  const OptionValues& section(std::string_view name) const { return at(name).values; }
  /// The one plugin that the section selects.
  const std::string& id(std::string_view name) const { return section(name).get<std::string>("id"); }

  /// The tables of [[section.key]], in order, with the keys that the user wrote. `where` calls the first's keys
  /// "groups.1.match".
  std::vector<OptionValues> list(std::string_view section, const std::string& key) const;

  /// All plugins that the section selects, each once, in the order in which they are named.
  const std::vector<std::string>& ids(std::string_view name) const { return at(name).selected; }

  /// Keys of [name.<id>] of the one plugin, defaults filled in.
  const OptionValues& plugin_options(std::string_view name) const { return at(name).plugin(id(name)).values; }
  /// What the factory of a selected plugin is to be given: plugin_options, and where the section has an options file (a
  /// model's `config`) that key too. While the file is set only the keys that the user wrote are given with it, so that
  /// the factory can lay them over the file's values.
  OptionValues factory_values(std::string_view name, const std::string& id) const;
  OptionValues factory_values(std::string_view name) const { return factory_values(name, id(name)); }

  /// Whether the user wrote that key of the section.
  bool sets(std::string_view section, std::string_view key) const { return at(section).written.find(key) != nullptr; }

  /// "run.toml:3:1: train.steps" of a key ("steps", or "cpu.threads" in a plugin's table), for errors found later.
  std::string where(std::string_view section, std::string_view key) const;
  /// The same of a key's path, "optimizer.master" or "device.cpu.threads"; another text stays as it is.
  std::string where(const std::string& path) const;

  /// A config that resolves to the same values: everything spelled out, defaults and plugin versions marked in
  /// comments. Defaults of a plugin with an options file are left to that file.
  std::string to_toml() const;

 private:
  friend class Resolver;

  struct Table {
    std::vector<std::string> order;             // keys as declared
    OptionValues values, written;               // with defaults; as the user wrote them
    std::map<std::string, std::string> preset;  // keys that a preset set, and "zero = 2"
  };
  struct PluginTable : Table {
    std::string origin;
  };
  struct Section : Table {
    std::string name, plugin_kind, options_file_key;
    bool one_plugin = false;                     // selected by `id`
    std::vector<std::string> selected;           // ids
    std::map<std::string, PluginTable> plugins;  // by id; those not selected too, where they have a table
    std::map<std::string, std::vector<Table>> lists;
    bool has_options_file() const;
    const PluginTable& plugin(const std::string& id) const;
  };

  const Section& at(std::string_view name) const;
  std::string name_;
  std::vector<Section> sections_;
  std::map<std::string, Position, std::less<>> keys_, tables_;  // by full path: "device.cpu.threads"
};

/// Checks everything; throws one config error with a line for each finding, in the document's order:
///   run.toml:3:1: train.steps: out of range, found 0, expected an integer of at least 1
/// Plugins that the document names are loaded into `host`.
ResolvedConfig resolve(const ConfigDocument& document, const std::vector<SectionSchema>& schemas, PluginHost& host);

}  // namespace quern
