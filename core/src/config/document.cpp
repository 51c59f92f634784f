// toml++ does the parsing; its tree is copied into ours so that no other file needs its header.
#include "config/document.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <system_error>
#include <tuple>
#include <vector>

#include <toml++/toml.h>

#include "base/shorten.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr std::size_t kMostDots = 4096;

[[noreturn]] void fail(const std::string& where, std::string what, std::string found, std::string expected,
                       std::string next = {}) {
  throw Error(ErrorCode::config, {.where = where,
                                  .what = std::move(what),
                                  .found = std::move(found),
                                  .expected = std::move(expected),
                                  .next = std::move(next)});
}

bool is_bare(std::string_view key) {
  constexpr std::string_view kBare = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
  return !key.empty() && key.find_first_not_of(kBare) == std::string_view::npos;
}

/// Past a text that begins at `at`, as TOML has them: an escaped mark does not end it, a line's end ends one of a line.
std::size_t past_text(std::string_view text, std::size_t at) {
  const char mark = text[at];
  const std::string many(3, mark);
  const bool lines = text.substr(at, 3) == many;
  for (at += lines ? 3 : 1; at < text.size(); ++at) {
    if (text[at] == '\\' && mark == '"') {
      ++at;
    } else if (lines && text.substr(at, 3) == many) {
      at += 3;
      for (int more = 0; more < 2 && at < text.size() && text[at] == mark; ++more) ++at;  // marks before the end
      return at;
    } else if (!lines && (text[at] == mark || text[at] == '\n')) {
      return at + 1;
    }
  }
  return text.size();
}

/// Whether the dot is part of a number, not one between the parts of a key such as 1.2.3.
bool is_of_number(std::string_view text, std::size_t dot) {
  constexpr std::string_view kNumber = "0123456789_eE+-", kBlank = " \t";
  auto is_in = [&](std::string_view letters, std::size_t at) {
    return at < text.size() && letters.find(text[at]) != std::string_view::npos;
  };
  std::size_t left = dot - 1, right = dot + 1;  // before 0: behind the end
  if (!is_in(kNumber, left) || !is_in(kNumber, right)) return false;
  while (is_in(kNumber, left) || is_in(kBlank, left)) --left;
  while (is_in(kNumber, right) || is_in(kBlank, right)) ++right;
  return !is_in(".", left) && !is_in(".", right);
}

std::size_t dots_of_keys(std::string_view text) {
  std::size_t dots = 0;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == '"' || text[at] == '\'') {
      at = past_text(text, at);
    } else if (text[at] == '#') {
      at = std::min(text.find('\n', at), text.size());
    } else {
      if (text[at] == '.' && !is_of_number(text, at)) ++dots;
      ++at;
    }
  }
  return dots;
}

// Tables nest by '.' without bound and are freed recursively; toml++ itself bounds nested brackets.
void check_size(std::string_view text, const std::string& name) {
  if (text.size() > ConfigDocument::kLargestFile)
    fail(name, "too large for a config", "more than " + std::to_string(ConfigDocument::kLargestFile) + " bytes",
         "at most as many");
  if (const std::size_t dots = dots_of_keys(text); dots > kMostDots)
    fail(name, "may nest too deeply", std::to_string(dots) + " dots in keys", "at most " + std::to_string(kMostDots));
}

toml::table parse_toml(std::string_view text, const std::string& name) {
  try {
    return toml::parse(text, std::string_view(name));
  } catch (const toml::parse_error& e) {
    const auto& begin = e.source().begin;
    const bool is_text = text.find('\0') == text.npos && e.description().find("utf-8") == std::string_view::npos;
    throw Error(ErrorCode::config, {.where = Position{name, begin.line, begin.column}.text(),
                                    .what = "not valid TOML: " + std::string(e.description()),
                                    .found = {},
                                    .expected = {},
                                    .next = is_text ? "" : "save the file as text in UTF-8"});
  }
}

// A list of texts or of numbers; anything else is no option's value.
std::optional<OptionValue> list_of(const toml::array& array) {
  std::vector<std::string> texts;
  std::vector<double> reals;
  for (const toml::node& item : array) {
    if (const auto* text = item.as_string())
      texts.push_back(text->get());
    else if (const auto* real = item.as_floating_point())
      reals.push_back(real->get());
    else if (const auto* integer = item.as_integer())
      reals.push_back(static_cast<double>(integer->get()));
    else
      return std::nullopt;
  }
  if (reals.empty()) return OptionValue(std::move(texts));
  if (texts.empty()) return OptionValue(std::move(reals));
  return std::nullopt;
}

std::optional<OptionValue> leaf_value(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::boolean: return OptionValue(node.as_boolean()->get());
    case toml::node_type::integer: return OptionValue(std::int64_t{node.as_integer()->get()});
    case toml::node_type::floating_point: return OptionValue(node.as_floating_point()->get());
    case toml::node_type::string: return OptionValue(node.as_string()->get());
    case toml::node_type::array: return list_of(*node.as_array());
    default: return std::nullopt;
  }
}

// `fixed`: the position of all that an override brings; else each key has its own.
ConfigNode convert(const toml::node& node, const Position& position, const Position* fixed, int depth) {
  if (depth > ConfigDocument::kDeepest)
    fail(position.text(), "nested too deeply", "more than " + std::to_string(ConfigDocument::kDeepest) + " tables",
         "fewer");
  ConfigNode out;
  out.position = position;
  const toml::table* table = node.as_table();
  const toml::array* array = node.as_array();
  if (array && !array->empty() && array->is_homogeneous(toml::node_type::table)) {
    for (const toml::node& item : *array) {
      const auto& begin = item.source().begin;
      out.items.push_back(
          convert(item, fixed ? *fixed : Position{position.source, begin.line, begin.column}, fixed, depth + 1));
    }
    out.found = "a list of tables";
    return out;
  }
  if (!table) {
    out.value = leaf_value(node);
    if (out.value)
      out.found = shortened(to_string(*out.value));
    else
      out.found = node.is_array() ? "a list of mixed or nested values" : "a date or time";
    return out;
  }
  out.is_table = true;
  out.found = "a table";
  for (auto&& [key, child] : *table) {
    const auto& begin = key.source().begin;
    const Position own = fixed ? *fixed : Position{position.source, begin.line, begin.column};
    out.children.emplace(std::string(key.str()), convert(child, own, fixed, depth + 1));
  }
  return out;
}

// The value of an override. Only a word that could not be meant as TOML is taken as it stands.
ConfigNode override_value(const std::string& text, const Position& position, int depth) {
  const std::string where = position.text();
  if (text.find_first_of("\n\r") != std::string::npos)
    fail(where, "bad value", "a line break", "one value on one line");
  check_size(text, where);
  try {
    toml::table table = toml::parse("v = " + (text.empty() ? "\"\"" : text));
    return convert(*table.get("v"), position, &position, depth);
  } catch (const toml::parse_error& e) {
    if (std::string_view("\"'[{").find(text.front()) != std::string_view::npos)
      fail(where, "not valid TOML: " + std::string(e.description()), shortened(text), "a value");
  }
  // What a run was configured with is written as TOML, which has no other bytes.
  if (without_control(text) != text)
    fail(where, "control characters, or bytes that are no UTF-8", shortened(text), "text",
         "write control characters as escapes in double quotes");
  ConfigNode word;
  word.position = position;
  word.value = OptionValue(text);
  word.found = shortened(to_string(*word.value));
  return word;
}

}  // namespace

std::string Position::text() const {
  return line == 0 ? source : source + ":" + std::to_string(line) + ":" + std::to_string(column);
}

bool Position::operator<(const Position& other) const {
  const bool last = source.starts_with("--set "), other_last = other.source.starts_with("--set ");
  return std::tie(last, source, line, column) < std::tie(other_last, other.source, other.line, other.column);
}

std::string spell_key(std::string_view key) {
  return shortened(is_bare(key) ? std::string(key) : to_string(OptionValue(std::string(key))));
}

ConfigDocument ConfigDocument::read(const std::filesystem::path& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text(kLargestFile + 1, '\0');
  if (file) file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file && !file.eof())
    throw Error(ErrorCode::input, {.where = path.string(),
                                   .what = "config cannot be read",
                                   .found = errno == 0 ? std::string() : std::generic_category().message(errno),
                                   .expected = "a readable TOML file",
                                   .next = "check the path and its permissions"});
  text.resize(static_cast<std::size_t>(file.gcount()));
  return parse(text, path.string());
}

ConfigDocument ConfigDocument::read(const std::filesystem::path& path, const std::vector<std::string>& assignments) {
  ConfigDocument document = read(path);
  for (const std::string& assignment : assignments) document.set(assignment);
  return document;
}

ConfigDocument ConfigDocument::parse(std::string_view text, std::string name) {
  check_size(text, name);
  ConfigDocument document;
  document.root_ = convert(parse_toml(text, name), Position{name, 0, 0}, nullptr, 0);
  document.name_ = std::move(name);
  return document;
}

void ConfigDocument::keep(const std::vector<std::string>& sections) {
  std::erase_if(root_.children, [&](const auto& section) {
    return std::find(sections.begin(), sections.end(), section.first) == sections.end();
  });
}

void ConfigDocument::set(std::string_view assignment) {
  const std::size_t equals = assignment.find('=');
  auto trimmed = [](std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
    while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
    return text;
  };
  const std::string path(trimmed(assignment.substr(0, equals)));
  const Position position{"--set " + shortened(path), 0, 0};
  if (equals == std::string_view::npos)
    fail("--set", "not an assignment", shortened(to_string(OptionValue(std::string(assignment)))), "section.key=value");
  ConfigNode* node = &root_;
  int depth = 0;
  for (std::size_t begin = 0; begin <= path.size(); ++depth) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    const std::string_view part = std::string_view(path).substr(begin, end - begin);
    if (!is_bare(part))
      fail(position.text(), "not a key", spell_key(part), "section.key=value with letters, digits, _ and -");
    if (depth >= kDeepest)
      fail(position.text(), "nested too deeply", "more than " + std::to_string(kDeepest) + " tables", "fewer");
    if (!node->is_table)
      fail(position.text(), "inside a key that is no table", node->found, "a table", "remove one of the two");
    auto [it, is_new] = node->children.try_emplace(std::string(part));
    node = &it->second;
    if (is_new) node->position = position, node->is_table = true, node->found = "a table";
    begin = end + 1;
  }
  *node = override_value(std::string(trimmed(assignment.substr(equals + 1))), position, depth);
}

}  // namespace quern
