#include "ab/arms.h"

#include "base/format.h"
#include "quern/error.h"

namespace quern::ab {

namespace {

constexpr std::size_t kMostArms = 1000;
constexpr std::size_t kLongestFolder = 80;

[[noreturn]] void refuse(const std::string& where, const std::string& what, const std::string& found,
                         const std::string& expected) {
  throw Error(ErrorCode::config, {.where = where, .what = what, .found = found, .expected = expected});
}

std::string trimmed(std::string_view text) {
  std::size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t");
  return begin == std::string_view::npos ? "" : std::string(text.substr(begin, end - begin + 1));
}

struct Assignment {
  std::string key, value;
};

Assignment assignment(const std::string& option, const std::string& text) {
  std::size_t equals = text.find('=');
  if (equals == std::string::npos) refuse(option, "not an assignment", text, "section.key=value");
  Assignment parts{trimmed(text.substr(0, equals)), trimmed(text.substr(equals + 1))};
  if (parts.key == "log.directory" || parts.key == "log.sinks")
    refuse(option + " " + parts.key, "is set by the comparison itself", text, "another key");
  return parts;
}

std::string folder_name(std::size_t number, const std::string& name) {
  std::string folder = std::to_string(number) + "-" + name.substr(0, kLongestFolder);
  for (char& c : folder) {
    bool safe = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
                c == '=' || c == '-';
    if (!safe) c = '_';
  }
  return folder;
}

Arm arm_of(const std::vector<std::string>& overrides) {
  Arm arm;
  arm.overrides = overrides;
  arm.name = format_list(overrides);
  return arm;
}

// Each of `arms` with each value of one more key.
std::vector<std::vector<std::string>> product(const std::vector<std::vector<std::string>>& arms,
                                              const std::string& words) {
  auto [key, text] = assignment("--vary", words);
  std::vector<std::string> values = split_values(text);
  std::vector<std::vector<std::string>> result;
  for (const auto& arm : arms)
    for (const std::string& value : values) {
      if (value.empty()) refuse("--vary " + key, "an empty value", words, "values with a comma between, \"\" for none");
      result.push_back(arm);
      result.back().push_back(key + "=" + value);
    }
  if (result.size() > kMostArms)
    refuse("--vary", "too many arms", std::to_string(result.size()), "at most " + std::to_string(kMostArms));
  return result;
}

}  // namespace

std::vector<std::string> split_values(std::string_view text) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  char quote = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == ',' && depth <= 0 && quote == 0) {
      parts.push_back(trimmed(part));
      part.clear();
      continue;
    }
    part += c;
    if (quote == '"' && c == '\\' && i + 1 < text.size()) {
      part += text[++i];
    } else if (quote != 0) {
      if (c == quote) quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else {
      depth += (c == '[' || c == '{') - (c == ']' || c == '}');
    }
  }
  parts.push_back(trimmed(part));
  return parts;
}

std::vector<Arm> make_arms(const std::vector<std::string>& vary, const std::vector<std::string>& by_hand) {
  std::vector<std::vector<std::string>> combinations;
  if (!vary.empty()) combinations.emplace_back();
  for (const std::string& words : vary) combinations = product(combinations, words);
  std::vector<Arm> arms;
  for (const auto& overrides : combinations) arms.push_back(arm_of(overrides));
  for (const std::string& words : by_hand) {
    std::vector<std::string> overrides;
    for (const std::string& part : split_values(words)) {
      auto [key, value] = assignment("--arm", part);
      overrides.push_back(key + "=" + value);
    }
    arms.push_back(arm_of(overrides));
  }
  if (arms.size() < 2)
    throw Error(ErrorCode::config, {.where = "quern ab",
                                    .what = "nothing to compare",
                                    .found = std::to_string(arms.size()) + (arms.size() == 1 ? " arm" : " arms"),
                                    .expected = "at least 2",
                                    .next = "give --vary a.b=v1,v2, or --arm a.b=v twice"});
  for (std::size_t i = 0; i < arms.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j)
      if (arms[j].overrides == arms[i].overrides) refuse("quern ab", "the same arm twice", arms[i].name, "each once");
    arms[i].folder = folder_name(i + 1, arms[i].name);
  }
  return arms;
}

}  // namespace quern::ab
