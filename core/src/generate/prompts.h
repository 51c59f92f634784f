#pragma once
// What generation begins from: token numbers, given as words or in files. Text becomes tokens outside of quern
// (`quern-tools generate`).

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "quern/generation.h"

namespace quern {

/// "1,2,3": token numbers between commas, with spaces or without. An input error at `where` otherwise.
std::vector<std::int32_t> parse_tokens(const std::string& text, const std::string& where);
/// The opposite, without spaces.
std::string tokens_text(const std::vector<std::int32_t>& tokens);

/// [1,2,3], or an object whose "tokens" are that. An input error at `where` otherwise; the vocabulary is not looked at.
std::vector<std::int32_t> tokens_of(const nlohmann::json& prompt, const std::string& where);

/// A .jsonl file: on each line [1,2,3], or an object whose "tokens" are that; its other names are not looked at. Empty
/// lines are passed over. A damaged line and a file without prompts are input errors.
std::vector<Prompt> read_prompts(const std::string& path);

/// `entry` is token numbers or such a file.
std::vector<Prompt> prompts_of(const std::string& entry, const std::string& where);

/// An input error for a prompt that is empty, has a token outside of the vocabulary, or with `max_tokens` more is
/// longer than `longest`, which `longest_name` names.
void check_prompts(const std::vector<Prompt>& prompts, std::int64_t vocabulary, std::int64_t max_tokens,
                   std::int64_t longest, const std::string& longest_name);

/// What a frontend calls the settings, for messages.
struct SettingNames {
  const char *max_tokens, *temperature, *top_p, *seed, *stop;
};

/// A config error for a setting out of range. A seed above the largest of 63 bits was given as a negative one.
void check_settings(const GenerateSettings& settings, std::int64_t vocabulary, const SettingNames& names);

}  // namespace quern
