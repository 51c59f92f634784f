// One walk over schemas and document; findings are collected, never thrown one by one.
#include "config/resolve.h"

#include <algorithm>

#include "base/files/home.h"
#include "base/format.h"
#include "base/shorten.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr std::size_t kMostFindings = 100;

struct Finding {
  Position position;
  std::string text;  // "section.key: what"
};

const OptionSpec* find_spec(const std::vector<OptionSpec>& specs, std::string_view key) {
  for (const OptionSpec& spec : specs)
    if (spec.key == key) return &spec;
  return nullptr;
}

// Names that may follow `prefix`: of "a.b" and "a.c", a at the top and b, c after "a.".
std::vector<std::string> names_after(const std::vector<OptionSpec>& specs, const std::string& prefix) {
  std::vector<std::string> names;
  for (const OptionSpec& spec : specs) {
    if (!spec.key.starts_with(prefix) || spec.key.size() == prefix.size()) continue;
    std::string name = spec.key.substr(prefix.size(), spec.key.find('.', prefix.size()) - prefix.size());
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  }
  return names;
}

// Of a text or a list of texts; of a value that is missing, none.
std::vector<std::string> texts_of(const OptionValue* value) {
  if (!value) return {};
  if (const auto* text = std::get_if<std::string>(value)) return {*text};
  return std::get<std::vector<std::string>>(*value);
}

std::string suggestion(std::string_view name, const std::vector<std::string>& known) {
  const std::string near = nearest_name(name, known);
  return near.empty() ? near : std::string("; nearest name `").append(near).append("`");
}

}  // namespace

class Resolver {
 public:
  Resolver(const ConfigDocument& document, const std::vector<SectionSchema>& schemas, PluginHost& host)
      : document_(document), schemas_(schemas), host_(host) {}

  ResolvedConfig run() {
    out_.name_ = document_.name();
    refuse_unknown_sections();
    for (const SectionSchema& schema : schemas_) {
      auto it = document_.root().children.find(schema.name);
      resolve_section(schema, it != document_.root().children.end() && it->second.is_table ? &it->second : nullptr);
    }
    report();
    return std::move(out_);
  }

 private:
  using Section = ResolvedConfig::Section;
  using Table = ResolvedConfig::Table;
  using PluginTable = ResolvedConfig::PluginTable;
  using PluginTables = std::map<std::string, const ConfigNode*>;

  void add(const Position& position, const std::string& key, const std::string& what) {
    findings_.push_back({position, key + ": " + what});
  }

  // Of the key, else of the innermost table around it, else the document.
  Position position_of(const std::string& path) const {
    if (auto it = out_.keys_.find(path); it != out_.keys_.end()) return it->second;
    for (std::size_t end = path.rfind('.'); end != std::string::npos;
         end = end == 0 ? std::string::npos : path.rfind('.', end - 1))
      if (auto it = out_.tables_.find(path.substr(0, end)); it != out_.tables_.end()) return it->second;
    return {document_.name(), 0, 0};
  }

  void refuse_unknown_sections() {
    std::vector<std::string> known;
    for (const SectionSchema& schema : schemas_) known.push_back(schema.name);
    for (const auto& [name, node] : document_.root().children) {
      if (std::find(known.begin(), known.end(), name) == known.end())
        add(node.position, spell_key(name),
            "unknown section, expected one of " + format_list(known, "none") + suggestion(name, known));
      else if (!node.is_table)
        add(node.position, name, "wrong type, found " + node.found + ", expected a table");
    }
  }

  // Reads the keys of a table. Tables directly in it that no option explains go to `plugins`, when there is one.
  void read(const ConfigNode& node, const std::string& path, const std::string& prefix,
            const std::vector<OptionSpec>& specs, Table& table, PluginTables* plugins) {
    const std::vector<std::string> known = names_after(specs, prefix);
    for (const auto& [name, child] : node.children) {
      const std::string key = prefix + name, shown = path + "." + prefix + spell_key(name);
      const bool plain = name.find('.') == std::string::npos;  // "a.b" in quotes is not a.b
      const OptionSpec* spec = plain ? find_spec(specs, key) : nullptr;
      if (spec)
        read_value(child, path + "." + key, *spec, table);
      else if (plain && std::find(known.begin(), known.end(), name) != known.end()) {
        if (child.is_table)
          read(child, path, key + ".", specs, table, nullptr);
        else
          add(child.position, shown,
              "wrong type, found " + child.found + ", expected a table with " +
                  format_list(names_after(specs, key + "."), "none"));
      } else if (plugins && child.is_table) {
        (*plugins)[name] = &child;
      } else {
        const std::string moved = moved_to(path, key);
        add(child.position, shown,
            !moved.empty() ? "unknown key: " + moved
                           : "unknown key, expected one of " + format_list(known, "none") + suggestion(name, known));
      }
    }
  }

  /// What serves the purpose of a section's key that is no more; empty: there was none.
  std::string moved_to(const std::string& section, const std::string& key) const {
    for (const SectionSchema& schema : schemas_)
      if (const auto it = schema.moved.find(key); schema.name == section && it != schema.moved.end()) return it->second;
    return "";
  }

  void read_value(const ConfigNode& node, const std::string& path, const OptionSpec& spec, Table& table) {
    out_.keys_[path] = node.position;
    if (!node.value)
      return add(node.position, path, "wrong type, found " + node.found + ", expected " + describe_expected(spec));
    OptionValue value = *node.value;
    if (auto* text = std::get_if<std::string>(&value)) *text = cached_model(expand_home(*text));
    if (auto* texts = std::get_if<std::vector<std::string>>(&value))
      std::transform(texts->begin(), texts->end(), texts->begin(), expand_home);
    if (auto fault = check_option(spec, value)) return add(node.position, path, *fault);
    table.written.set(spec.key, value);
    table.values.set(spec.key, std::move(value));
  }

  Table table_of(const std::vector<OptionSpec>& specs) {
    Table table;
    for (const OptionSpec& spec : specs) table.order.push_back(spec.key);
    table.values = default_values(specs);
    return table;
  }

  void require_all(const std::string& path, const std::vector<OptionSpec>& specs) {
    for (const OptionSpec& spec : specs) {
      const std::string key = path + "." + spec.key;
      if (spec.required && !out_.keys_.contains(key))
        add(position_of(key), key, "missing, expected " + describe_expected(spec) + " (" + spec.help + ")");
    }
  }

  /// What the section's preset gives to keys that the user did not write; errors about these point to the preset.
  void apply_preset(const SectionSchema& schema, Section& section) {
    if (schema.preset_key.empty()) return;
    const auto number = section.values.get<std::int64_t>(schema.preset_key);
    for (const auto& [key, text] : schema.presets[static_cast<std::size_t>(number)]) {
      if (section.written.find(key)) continue;
      section.values.set(key, text);
      section.preset[key] = schema.preset_key + " = " + std::to_string(number);
      out_.keys_.emplace(schema.name + "." + key, position_of(schema.name + "." + schema.preset_key));
    }
  }

  void resolve_section(const SectionSchema& schema, const ConfigNode* node) {
    const std::size_t before = findings_.size();
    const std::vector<OptionSpec> specs = section_options(schema);
    Section section;
    static_cast<Table&>(section) = table_of(specs);
    section.name = schema.name;
    section.plugin_kind = schema.plugin_kind;
    section.options_file_key = schema.options_file_key;
    ConfigNode rest;  // the plugins' tables are in it
    PluginTables plugins;
    if (node) {
      out_.tables_[schema.name] = node->position;
      rest = *node;
      for (const ListSchema& list : schema.lists) read_list(schema.name, list, rest, section);
      read(rest, schema.name, "", specs, section, schema.plugin_kind.empty() ? nullptr : &plugins);
    }
    require_all(schema.name, specs);
    apply_preset(schema, section);
    if (schema.check && findings_.size() == before)
      for (const auto& [key, what] : schema.check(section.values)) {
        const std::string path = schema.name + "." + key;
        add(position_of(path), path, what);
      }
    if (!schema.plugin_kind.empty()) resolve_plugins(schema, section, plugins);
    out_.sections_.push_back(std::move(section));
  }

  /// Takes the key out of the node.
  void read_list(const std::string& section_name, const ListSchema& list, ConfigNode& node, Section& section) {
    const auto it = node.children.find(list.key);
    if (it == node.children.end()) return;
    const ConfigNode all = std::move(it->second);
    node.children.erase(it);
    const std::string path = section_name + "." + list.key;
    if (all.items.empty())
      return add(all.position, path, "wrong type, found " + all.found + ", expected tables [[" + path + "]]");
    for (std::size_t i = 0; i < all.items.size(); ++i) {
      const std::string name = path + "." + std::to_string(i + 1);
      Table table = table_of(list.options);
      out_.tables_[name] = all.items[i].position;
      read(all.items[i], name, "", list.options, table, nullptr);
      require_all(name, list.options);
      section.lists[list.key].push_back(std::move(table));
    }
  }

  // A plugin may be named by several keys, but only once in a list.
  void resolve_plugins(const SectionSchema& schema, Section& section, const PluginTables& tables) {
    section.one_plugin = schema.plugin_keys.empty();
    std::vector<std::string> named;
    for (const std::string& key : section.one_plugin ? std::vector<std::string>{"id"} : schema.plugin_keys) {
      if (schema.selects && !schema.selects(section.values, key)) continue;
      std::vector<std::string> here;
      const OptionValue* value = section.values.find(key);
      const bool listed = value && std::holds_alternative<std::vector<std::string>>(*value);
      for (const std::string& text : texts_of(value)) {
        const std::string id = schema.id_in ? schema.id_in(text) : text;
        const std::string path = schema.name + "." + key;
        if (std::find(here.begin(), here.end(), id) != here.end())
          add(position_of(path), path, "found " + shortened(to_string(OptionValue(id))) + " twice, expected it once");
        here.push_back(id);
        if (std::find(schema.no_plugin.begin(), schema.no_plugin.end(), id) != schema.no_plugin.end()) continue;
        if (std::find(named.begin(), named.end(), id) != named.end()) continue;
        named.push_back(id);
        select_plugin(schema, section, path, id, listed, tables);
      }
    }
    if (schema.plugins_in_list) select_listed(schema, section, *schema.plugins_in_list, named, tables);
    for (const auto& [id, node] : tables) {
      if (std::find(named.begin(), named.end(), id) != named.end()) continue;
      const std::string shown = schema.name + "." + spell_key(id);
      if (const Factory* factory = plugin(schema, id, {}, shown, false, node->position))
        section.plugins[id] = plugin_table(schema, id, *factory, node);
    }
  }

  void select_listed(const SectionSchema& schema, Section& section, const SectionSchema::ListedKey& from,
                     std::vector<std::string>& named, const PluginTables& tables) {
    const auto& lists = out_.at(from.section).lists;
    const auto list = lists.find(from.list);
    if (list == lists.end()) return;
    for (std::size_t i = 0; i < list->second.size(); ++i) {
      const OptionValue* id = list->second[i].written.find(from.key);
      if (!id || std::find(named.begin(), named.end(), std::get<std::string>(*id)) != named.end()) continue;
      named.push_back(std::get<std::string>(*id));
      const std::string path = from.section + "." + from.list + "." + std::to_string(i + 1) + "." + from.key;
      select_plugin(schema, section, path, named.back(), false, tables);
    }
  }

  void select_plugin(const SectionSchema& schema, Section& section, const std::string& key, const std::string& id,
                     bool listed, const PluginTables& tables) {
    const std::string file = section.one_plugin ? section.values.get<std::string>("path") : "";
    const Factory* factory = plugin(schema, id, file, key, listed, position_of(key));
    if (!factory) return;
    auto it = tables.find(id);
    section.selected.push_back(id);
    section.plugins[id] = plugin_table(schema, id, *factory, it == tables.end() ? nullptr : it->second);
    if (!section.has_options_file()) require_all(schema.name + "." + id, factory->options);
  }

  // A list that is to name no plugin is empty; another key has a text for that.
  const Factory* plugin(const SectionSchema& schema, const std::string& id, const std::string& path,
                        const std::string& key, bool listed, const Position& position) {
    try {
      return &host_.require(schema.plugin_kind, id, path);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::config) throw;
      const bool has_text = !listed && !schema.no_plugin.empty();
      add(position, key, error.what() + (has_text ? "; `" + schema.no_plugin[0] + "` needs no plugin" : ""));
      return nullptr;
    }
  }

  PluginTable plugin_table(const SectionSchema& schema, const std::string& id, const Factory& factory,
                           const ConfigNode* node) {
    PluginTable table{table_of(factory.options), host_.origin(schema.plugin_kind, id)};
    if (!node) return table;
    const std::string path = schema.name + "." + id;
    out_.tables_[path] = node->position;
    read(*node, path, "", factory.options, table, nullptr);
    return table;
  }

  void report() {
    if (findings_.empty()) return;
    std::stable_sort(findings_.begin(), findings_.end(),
                     [](const Finding& a, const Finding& b) { return a.position < b.position; });
    std::string text;
    if (findings_.size() > 1)
      text = document_.name() + ": " + std::to_string(findings_.size()) + " errors in the config\n";
    for (std::size_t i = 0; i < std::min(findings_.size(), kMostFindings); ++i) {
      if (i > 0) text += '\n';
      text += findings_[i].position.text() + ": " + findings_[i].text;
    }
    if (findings_.size() > kMostFindings) text += "\nand " + std::to_string(findings_.size() - kMostFindings) + " more";
    throw Error(ErrorCode::config, {.where = {}, .what = std::move(text), .found = {}, .expected = {}, .next = {}});
  }

  const ConfigDocument& document_;
  const std::vector<SectionSchema>& schemas_;
  PluginHost& host_;
  std::vector<Finding> findings_;
  ResolvedConfig out_;
};

std::vector<OptionSpec> section_options(const SectionSchema& schema) {
  std::vector<OptionSpec> specs;
  if (!schema.plugin_kind.empty() && schema.plugin_keys.empty()) {
    OptionSpec id;
    id.key = "id";
    id.type = OptionType::text;
    id.default_value = schema.default_id;
    id.required = schema.default_id.empty();
    id.help = "which " + schema.plugin_kind + " plugin; its options are in [" + schema.name + ".<id>]";
    OptionSpec path;
    path.key = "path";
    path.type = OptionType::text;
    path.default_value = std::string();
    path.help = "the plugin's file; empty: searched by id";
    specs = {std::move(id), std::move(path)};
  }
  specs.insert(specs.end(), schema.options.begin(), schema.options.end());
  return specs;
}

ResolvedConfig resolve(const ConfigDocument& document, const std::vector<SectionSchema>& schemas, PluginHost& host) {
  return Resolver(document, schemas, host).run();
}

}  // namespace quern
