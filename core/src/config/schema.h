#pragma once
// What a section of the config may hold. Components declare their options in their own header; a schema puts them
// under a section's name, and says whether the section selects plugins.

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "quern/options.h"

namespace quern {

/// Key inside the section, and what is wrong with it: a conflict between keys that are each valid.
using SectionFindings = std::vector<std::pair<std::string, std::string>>;

/// A key of a section that is a list of tables, [[section.key]]. Only what the user wrote of each is given.
struct ListSchema {
  std::string key, help;
  std::vector<OptionSpec> options;
};

struct SectionSchema {
  std::string name;
  std::string help;                 ///< one line
  std::vector<OptionSpec> options;  ///< the section's own keys; `id` and `path` are added where it selects one plugin

  /// Kind of the plugins that the section selects; their options are in [name.<id>]. Empty: none.
  std::string plugin_kind;
  std::string default_id;  ///< of the added key `id`; empty: it is required
  /// Keys of the section whose texts, or lists of texts, are ids of plugins. When there are any, `id` is not added.
  std::vector<std::string> plugin_keys;
  /// The id in such a text; empty: the text is the id.
  std::function<std::string(const std::string&)> id_in;
  /// A text key in the tables of an earlier section's list that selects plugins of this section too.
  struct ListedKey {
    std::string section, list, key;
  };
  std::optional<ListedKey> plugins_in_list = {};
  std::vector<std::string> no_plugin;  ///< texts of such keys that select none: "device"
  /// Whether such a key selects with these values of the section; empty: always.
  std::function<bool(const OptionValues&, const std::string& key)> selects;
  /// A text key of the section that names a file with plugin options of its own (a model's config.json). While it is
  /// set, required plugin keys may be absent and the factory alone can tell.
  std::string options_file_key;

  /// An integer key that gives other keys a value where the user did not write them: by its value, those keys' texts.
  std::string preset_key;
  std::vector<std::map<std::string, std::string>> presets;

  std::vector<ListSchema> lists = {};

  /// Keys that there were, and what serves their purpose now.
  std::map<std::string, std::string> moved;

  /// Conflicts between the section's own keys; called when each is valid by itself. May be empty.
  std::function<SectionFindings(const OptionValues&)> check;
};

template <class T>
SectionSchema section_of(std::string name, std::string help, const OptionTable<T>& table) {
  SectionSchema schema;
  schema.name = std::move(name);
  schema.help = std::move(help);
  schema.options = table.specs();
  return schema;
}

/// All keys of a section, `id` and `path` first where it selects one plugin.
std::vector<OptionSpec> section_options(const SectionSchema& schema);

}  // namespace quern
