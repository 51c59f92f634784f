#include "generate/prompts.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <limits>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/files/strict_json.h"
#include "base/shorten.h"
#include "quern/error.h"
#include "quern/options.h"

namespace quern {

namespace {

[[noreturn]] void refuse(const std::string& where, const std::string& what, const std::string& found,
                         const std::string& expected, const std::string& next = {}) {
  throw Error(ErrorCode::input, {where, what, shortened(found), expected, next});
}

// A pipe is as good as a file. What does not end must not fill the memory.
std::string text_of(const std::string& path) {
  constexpr std::size_t kMost = std::size_t{64} << 20;
  if (path.find('\0') != std::string::npos) refuse(path, "not a path", "a zero byte in it", "a .jsonl file of prompts");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text;
  std::vector<char> piece(std::size_t{1} << 16);
  while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())) || file.gcount() > 0) {
    text.append(piece.data(), static_cast<std::size_t>(file.gcount()));
    if (text.size() > kMost)
      refuse(path, "too large for a file of prompts", "more than " + std::to_string(kMost) + " bytes",
             "at most as many", "split the file");
  }
  if (!file.eof()) refuse(path, "cannot be read", std::strerror(errno), "a .jsonl file of prompts");
  return text;
}

}  // namespace

std::vector<std::int32_t> tokens_of(const nlohmann::json& line, const std::string& where) {
  const nlohmann::json* list = &line;
  if (line.is_object() && line.contains("tokens")) list = &line.at("tokens");
  if (!list->is_array()) refuse(where, "not a prompt", line.dump(), "[1, 2, 3] or {\"tokens\": [1, 2, 3]}");
  std::vector<std::int32_t> tokens;
  for (const nlohmann::json& item : *list) {
    // Negative ones are kept for check_prompts, which knows the vocabulary.
    const bool fits = item.is_number_integer() && item.get<double>() >= std::numeric_limits<std::int32_t>::min() &&
                      item.get<double>() <= std::numeric_limits<std::int32_t>::max();
    if (!fits) refuse(where, "not a token", item.dump(), "a whole number of 32 bits");
    tokens.push_back(item.get<std::int32_t>());
  }
  return tokens;
}

std::vector<std::int32_t> parse_tokens(const std::string& text, const std::string& where) {
  std::vector<std::int32_t> tokens;
  for (std::size_t at = 0; at <= text.size();) {
    std::size_t end = std::min(text.find(',', at), text.size());
    std::size_t first = std::min(text.find_first_not_of(' ', at), end), last = end;
    while (last > first && text[last - 1] == ' ') --last;
    std::int32_t token = 0;
    auto [stop, error] = std::from_chars(text.data() + first, text.data() + last, token);
    if (first == last || error != std::errc() || stop != text.data() + last)
      refuse(where, "not a list of tokens", "\"" + text + "\"", "token numbers between commas, such as 1,2,3");
    tokens.push_back(token);
    at = end + 1;
  }
  return tokens;
}

std::string tokens_text(const std::vector<std::int32_t>& tokens) {
  std::string text;
  for (std::int32_t token : tokens) text += (text.empty() ? "" : ",") + std::to_string(token);
  return text;
}

std::vector<Prompt> read_prompts(const std::string& path) {
  std::vector<Prompt> prompts;
  const std::string text = text_of(path);
  std::size_t begin = 0, end = 0;
  for (std::int64_t number = 1; begin < text.size(); begin = end + 1, ++number) {
    end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    std::string where = path + ":" + std::to_string(number);
    std::vector<std::int32_t> tokens = tokens_of(parse_strict_json(where, line, 8), where);
    prompts.push_back({std::move(where), std::move(tokens)});
  }
  if (prompts.empty())
    refuse(path, "no prompt in the file", {}, "one a line", "`quern-tools generate --write` makes one");
  return prompts;
}

std::vector<Prompt> prompts_of(const std::string& entry, const std::string& where) {
  bool numbers = entry.find_first_not_of("0123456789, ") == std::string::npos;
  if (!numbers) return read_prompts(entry);
  return {{where + " \"" + shortened(entry) + "\"", parse_tokens(entry, where)}};
}

void check_prompts(const std::vector<Prompt>& prompts, std::int64_t vocabulary, std::int64_t max_tokens,
                   std::int64_t longest, const std::string& longest_name) {
  for (const Prompt& prompt : prompts) {
    if (prompt.tokens.empty()) refuse(prompt.where, "empty prompt", "no token", "at least 1");
    for (std::int32_t token : prompt.tokens)
      if (token < 0 || token >= vocabulary)
        refuse(prompt.where, "token outside of the vocabulary", std::to_string(token),
               "from 0 to " + std::to_string(vocabulary - 1), "make prompts with the tokenizer of the model");
    const auto length = static_cast<std::int64_t>(prompt.tokens.size());
    if (length > longest - max_tokens)
      refuse(prompt.where, "prompt and new tokens are longer than " + longest_name,
             std::to_string(length) + " + " + std::to_string(max_tokens) + " tokens",
             "at most " + std::to_string(longest), "shorten the prompt or ask for fewer tokens");
  }
}

void check_settings(const GenerateSettings& settings, std::int64_t vocabulary, const SettingNames& names) {
  auto require = [](const char* name, const auto& value, bool good, const std::string& expected) {
    if (!good)
      throw Error(ErrorCode::config, {.where = name,
                                      .what = "out of range",
                                      .found = to_string(OptionValue(value)),
                                      .expected = expected,
                                      .next = {}});
  };
  const auto& [temperature, top_p, bits] = settings.sampling;
  require(names.max_tokens, settings.max_tokens, settings.max_tokens >= 1, "at least 1");
  require(names.temperature, temperature, temperature >= 0 && temperature <= std::numeric_limits<double>::max(),
          "a number of at least 0");
  require(names.top_p, top_p, top_p > 0 && top_p <= 1, "above 0 and at most 1");
  const auto seed = static_cast<std::int64_t>(bits);
  require(names.seed, seed, seed >= 0, "at least 0");
  for (const std::int64_t token : settings.stop)
    require(names.stop, token, token >= 0 && token < vocabulary,
            "from 0, below the vocabulary of " + std::to_string(vocabulary));
}

}  // namespace quern
