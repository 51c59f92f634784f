// Rendering only; order is the declarations' and, for plugins, alphabetical.
#include "config/reference.h"

#include <algorithm>
#include <array>

namespace quern {

namespace {

using Row = std::array<std::string, 4>;

// Prose in Markdown: <id> is no HTML tag.
std::string prose(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '<') out += '\\';
    out += c;
  }
  return out;
}

// A cell must stay in its cell.
std::string cell(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '|')
      out += "\\|";
    else
      out += c == '\n' ? ' ' : c;
  }
  return out;
}

// Printed width: code points, near enough for what options say.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; }));
}

std::string code(const std::string& text) { return std::string("`").append(text).append("`"); }

}  // namespace

std::string options_table(const std::vector<OptionSpec>& options) {
  if (options.empty()) return "No options.\n";
  std::vector<Row> rows = {{"key", "value", "default", "meaning"}, {}};
  for (const OptionSpec& spec : options)
    rows.push_back({code(spec.key), cell(describe_expected(spec)),
                    spec.required ? "required" : code(cell(to_string(spec.default_value))), cell(prose(spec.help))});
  std::array<std::size_t, 4> widths{};
  for (const Row& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  for (std::size_t i = 0; i < widths.size(); ++i) rows[1][i] = std::string(widths[i], '-');
  std::string out;
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      out.append("| ").append(row[i]);
      out.append(widths[i] - width(row[i]) + 1, ' ');
    }
    out += "|\n";
  }
  return out;
}

std::string reference_markdown(const std::vector<SectionSchema>& schemas, PluginHost& host) {
  std::string out =
      "# Configuration reference\n\n"
      "One TOML file is one run. Any key can be overridden on the command line with `--set section.key=value`.\n"
      "This page is made by `quern config reference` from the declarations that validate the file.\n";
  for (const SectionSchema& schema : schemas) {
    out += "\n## [" + schema.name + "]\n\n";
    if (!schema.help.empty()) out += schema.help + "\n\n";
    out += options_table(section_options(schema));
    if (schema.plugin_kind.empty()) continue;
    for (const PluginEntry& entry : host.list(schema.plugin_kind)) {
      out += "\n### [" + schema.name + "." + entry.id + "]\n\n";
      if (entry.factory)
        out += (entry.factory->summary.empty() ? "" : entry.factory->summary + "\n\n") +
               options_table(entry.factory->options);
      else
        out += "Cannot be loaded: " + entry.refusal + "\n";
    }
  }
  return out;
}

}  // namespace quern
