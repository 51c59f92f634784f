// Rendering only; order is the declarations' and, for plugins, alphabetical.
#include "config/reference.h"

#include <algorithm>
#include <array>
#include <numeric>

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

using Widths = std::array<std::size_t, 4>;

// As wide as the widest cell; where lines are to have at most `most` columns, the widest give way.
Widths widths_of(const std::vector<Row>& rows, std::size_t most) {
  constexpr std::size_t kBorders = 13, kNarrowest = 12;
  Widths widths{};
  for (const Row& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  while (most > 0 && std::accumulate(widths.begin(), widths.end(), kBorders) > most) {
    std::size_t& widest = *std::max_element(widths.begin(), widths.end());
    if (widest <= kNarrowest) break;
    --widest;
  }
  return widths;
}

// Takes from the front of `text` what a line of `columns` holds: whole words, or part of one that is longer.
std::string take_line(std::string& text, std::size_t columns) {
  std::size_t end = 0, shown = 0, space = std::string::npos;
  for (; end < text.size(); ++end) {
    if ((static_cast<unsigned char>(text[end]) & 0xc0) != 0x80 && shown++ == columns) break;
    if (text[end] == ' ') space = end;
  }
  if (end < text.size() && text[end] != ' ' && space != std::string::npos) end = space;
  std::string line = text.substr(0, end);
  text.erase(0, end);
  text.erase(0, text.find_first_not_of(' '));
  return line;
}

std::string code(const std::string& text) { return std::string("`").append(text).append("`"); }

}  // namespace

std::string options_table(const std::vector<OptionSpec>& options, std::size_t most) {
  if (options.empty()) return "No options.\n";
  std::vector<Row> rows = {{"key", "value", "default", "meaning"}};
  for (const OptionSpec& spec : options)
    rows.push_back({code(spec.key), cell(describe_expected(spec)),
                    spec.required ? "required" : code(cell(to_string(spec.default_value))), cell(prose(spec.help))});
  const Widths widths = widths_of(rows, most);
  Row rule;
  for (std::size_t i = 0; i < rule.size(); ++i) rule[i] = std::string(widths[i], '-');
  rows.insert(rows.begin() + 1, rule);
  std::string out;
  for (Row& row : rows) {
    do {  // a line of the row, as long as a cell has some text left
      for (std::size_t i = 0; i < row.size(); ++i) {
        const std::string line = take_line(row[i], widths[i]);
        out.append("| ").append(line);
        out.append(widths[i] - width(line) + 1, ' ');
      }
      out += "|\n";
    } while (std::any_of(row.begin(), row.end(), [](const std::string& rest) { return !rest.empty(); }));
  }
  return out;
}

std::string reference_markdown(const std::vector<SectionSchema>& schemas, PluginHost& host, std::size_t most) {
  std::string out =
      "# Configuration reference\n\n"
      "One TOML file is one run. Any key can be overridden on the command line with `--set section.key=value`.\n"
      "This page is made by `quern config reference` from the declarations that validate the file.\n";
  for (const SectionSchema& schema : schemas) {
    out += "\n## [" + schema.name + "]\n\n";
    if (!schema.help.empty()) out += schema.help + "\n\n";
    out += options_table(section_options(schema), most);
    for (const ListSchema& list : schema.lists)
      out +=
          "\n### [[" + schema.name + "." + list.key + "]]\n\n" + list.help + "\n\n" + options_table(list.options, most);
    if (schema.plugin_kind.empty()) continue;
    for (const PluginEntry& entry : host.list(schema.plugin_kind)) {
      out += "\n### [" + schema.name + "." + entry.id + "]\n\n";
      if (entry.factory)
        out += (entry.factory->summary.empty() ? "" : entry.factory->summary + "\n\n") +
               options_table(entry.factory->options, most);
      else
        out += "Cannot be loaded: " + entry.refusal + "\n";
    }
  }
  return out;
}

}  // namespace quern
