// What a resolved config answers, and its spelling as TOML.
#include "config/resolve.h"

#include <algorithm>

#include "quern/error.h"

namespace quern {

namespace {

// Dots in an option's key nest tables; every part is spelled as TOML wants it.
std::string dotted(const std::string& key) {
  std::string text;
  for (std::size_t begin = 0; begin <= key.size();) {
    const std::size_t end = std::min(key.find('.', begin), key.size());
    text.append(begin ? "." : "").append(spell_key(std::string_view(key).substr(begin, end - begin)));
    begin = end + 1;
  }
  return text;
}

std::string comment(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';  // TOML forbids control characters in comments
  return "  # " + text;
}

void write_keys(std::string& out, const std::vector<std::string>& order, const OptionValues& values,
                const OptionValues& written, const std::map<std::string, std::string>& preset = {}) {
  for (const std::string& key : order) {
    const OptionValue* value = values.find(key);
    if (!value) continue;
    const auto by = preset.find(key);
    const std::string origin = by != preset.end() ? comment(by->second) : comment("default");
    out += dotted(key) + " = " + to_string(*value) + (written.find(key) ? "" : origin) + "\n";
  }
}

}  // namespace

bool ResolvedConfig::Section::has_options_file() const {
  const OptionValue* file = options_file_key.empty() ? nullptr : values.find(options_file_key);
  return file && !std::get<std::string>(*file).empty();
}

const ResolvedConfig::Section& ResolvedConfig::at(std::string_view name) const {
  for (const Section& section : sections_)
    if (section.name == name) return section;
  fail_internal("config section " + std::string(name), "no schema declares it");
}

const ResolvedConfig::PluginTable& ResolvedConfig::Section::plugin(const std::string& id) const {
  auto it = plugins.find(id);
  if (it == plugins.end()) fail_internal("config section " + name, "has no plugin `" + id + "`");
  return it->second;
}

OptionValues ResolvedConfig::factory_values(std::string_view name, const std::string& id) const {
  const Section& section = at(name);
  const Table& plugin = section.plugin(id);
  if (section.options_file_key.empty()) return plugin.values;
  OptionValues values = section.has_options_file() ? plugin.written : plugin.values;
  values.set(section.options_file_key, *section.values.find(section.options_file_key));
  return values;
}

std::vector<OptionValues> ResolvedConfig::list(std::string_view section, const std::string& key) const {
  std::vector<OptionValues> values;
  const auto& lists = at(section).lists;
  if (auto it = lists.find(key); it != lists.end())
    for (const Table& table : it->second) values.push_back(table.written);
  return values;
}

std::string ResolvedConfig::where(std::string_view section, std::string_view key) const {
  const std::string path = std::string(section) + "." + std::string(key);
  if (auto it = keys_.find(path); it != keys_.end()) return it->second.text() + ": " + path;
  return name_ + ": " + path + " (default)";
}

std::string ResolvedConfig::where(const std::string& path) const {
  const std::size_t dot = path.find('.');
  if (dot == std::string::npos) return path;
  const std::string name = path.substr(0, dot), key = path.substr(dot + 1);
  const bool known =
      keys_.contains(path) || std::any_of(sections_.begin(), sections_.end(), [&](const Section& section) {
        if (section.name != name) return false;
        const std::size_t end = key.find('.');
        const auto plugin = section.plugins.find(key.substr(0, end));
        return section.values.find(key) != nullptr ||
               (plugin != section.plugins.end() && end != key.npos && plugin->second.values.find(key.substr(end + 1)));
      });
  return known ? where(name, key) : path;
}

std::string ResolvedConfig::to_toml() const {
  std::string out;
  for (const Section& section : sections_) {
    auto origin_of = [&](const std::string& id) {
      return comment(section.plugin_kind + " plugin: " + section.plugin(id).origin);
    };
    out += (out.empty() ? "[" : "\n[") + spell_key(section.name) + "]";
    if (section.one_plugin) out += origin_of(section.selected.front());
    out += "\n";
    write_keys(out, section.order, section.values, section.written, section.preset);
    for (const auto& [key, tables] : section.lists)
      for (const Table& table : tables) {
        out += "\n[[" + spell_key(section.name) + "." + spell_key(key) + "]]\n";
        write_keys(out, table.order, table.written, table.written);
      }
    const std::string table = "\n[" + spell_key(section.name) + ".";
    const bool from_file = section.has_options_file();
    for (const std::string& id : section.selected) {
      const PluginTable& plugin = section.plugin(id);
      const OptionValues& shown = from_file ? plugin.written : plugin.values;
      if (section.one_plugin && shown.all().empty()) continue;  // its origin stands above
      out += table + spell_key(id) + "]";
      if (!section.one_plugin) out += origin_of(id);
      if (from_file) out += comment("laid over " + section.options_file_key);
      out += "\n";
      write_keys(out, plugin.order, shown, plugin.written);
    }
    for (const auto& [id, other] : section.plugins) {
      if (std::find(section.selected.begin(), section.selected.end(), id) != section.selected.end()) continue;
      out += table + spell_key(id) + "]" + comment("not selected") + "\n";
      write_keys(out, other.order, other.written, other.written);
    }
  }
  return out;
}

}  // namespace quern
