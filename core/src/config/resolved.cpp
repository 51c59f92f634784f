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
                const OptionValues& written) {
  for (const std::string& key : order)
    if (const OptionValue* value = values.find(key))
      out += dotted(key) + " = " + to_string(*value) + (written.find(key) ? "" : comment("default")) + "\n";
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

OptionValues ResolvedConfig::factory_values(std::string_view name) const {
  const Section& section = at(name);
  if (section.options_file_key.empty()) return section.plugin.values;
  OptionValues values = section.has_options_file() ? section.plugin.written : section.plugin.values;
  values.set(section.options_file_key, *section.values.find(section.options_file_key));
  return values;
}

std::string ResolvedConfig::where(std::string_view section, std::string_view key) const {
  const std::string path = std::string(section) + "." + std::string(key);
  if (auto it = keys_.find(path); it != keys_.end()) return it->second.text() + ": " + path;
  return name_ + ": " + path + " (default)";
}

std::string ResolvedConfig::to_toml() const {
  std::string out;
  for (const Section& section : sections_) {
    out += (out.empty() ? "[" : "\n[") + spell_key(section.name) + "]";
    if (!section.plugin_kind.empty()) out += comment(section.plugin_kind + " plugin: " + section.origin);
    out += "\n";
    write_keys(out, section.order, section.values, section.written);
    if (section.plugin_kind.empty()) continue;
    const bool from_file = section.has_options_file();
    const OptionValues& shown = from_file ? section.plugin.written : section.plugin.values;
    const std::string table = "\n[" + spell_key(section.name) + ".";
    if (!shown.all().empty()) {
      out += table + spell_key(this->id(section.name)) + "]" +
             (from_file ? comment("laid over " + section.options_file_key) : "") + "\n";
      write_keys(out, section.plugin.order, shown, section.plugin.written);
    }
    for (const auto& [id, other] : section.unselected) {
      out += table + spell_key(id) + "]" + comment("not selected") + "\n";
      write_keys(out, other.order, other.written, other.written);
    }
  }
  return out;
}

}  // namespace quern
