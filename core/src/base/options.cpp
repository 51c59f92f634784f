// Checking and spelling of option values. The rules are the same for TOML, --set and Hugging Face JSON: an integer may
// stand for a real or a size and a text for a list of one, nothing else converts, reals are finite, and an empty list
// is a list of whatever is wanted.
#include "quern/options.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>
#include <utility>

#include "base/shorten.h"
#include "quern/error.h"

namespace quern {

namespace {

std::string quoted(std::string_view text) {
  static constexpr char kHex[] = "0123456789ABCDEF";
  std::string out = "\"";
  for (char c : text) {
    auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      out += '\\', out += c;
    else if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else if (byte < 0x20 || byte == 0x7f)
      out += "\\u00", out += kHex[byte >> 4], out += kHex[byte & 15];
    else
      out += c;
  }
  return out + '"';
}

std::string spell(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[32];
  auto result = std::to_chars(buffer, buffer + sizeof buffer, value);  // shortest that reads back to the same bits
  std::string text(buffer, result.ptr);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

template <class List, class Spell>
std::string spell_list(const List& list, Spell spell_one) {
  std::string text = "[";
  for (const auto& item : list) text += (text.size() > 1 ? ", " : "") + spell_one(item);
  return text + "]";
}

// A bound of an integer option reads as an integer.
std::string spell_bound(double bound, OptionType type) {
  bool whole = type == OptionType::integer && std::fabs(bound) < 9e15 && bound == std::floor(bound);
  return whole ? std::to_string(static_cast<std::int64_t>(bound)) : spell(bound);
}

std::string range_text(const OptionSpec& spec) {
  const bool low = std::isfinite(spec.minimum), high = std::isfinite(spec.maximum);
  const std::string least = low ? spell_bound(spec.minimum, spec.type) : "";
  const std::string most = high ? spell_bound(spec.maximum, spec.type) : "";
  if (low && high && !spec.open_minimum) return " from " + least + " to " + most;
  std::string text;
  if (low) text = (spec.open_minimum ? " above " : " of at least ") + least;
  if (high) text += (low ? " and at most " : " of at most ") + most;
  return text;
}

bool within(const OptionSpec& spec, long double value) {
  if (spec.open_minimum ? !(value > spec.minimum) : !(value >= spec.minimum)) return false;
  return value <= spec.maximum;
}

// Devices compute in 32 bits, where another value would be zero or infinite.
bool fits_single(double value) {
  const double magnitude = std::fabs(value);
  return value == 0 || (magnitude >= double{std::numeric_limits<float>::min()} &&
                        magnitude <= double{std::numeric_limits<float>::max()});
}
constexpr const char* kSingleRange = " that is 0 or has a magnitude from 1.2e-38 to 3.4e+38";

bool chosen(const OptionSpec& spec, const std::string& text) {
  return spec.choices.empty() || std::find(spec.choices.begin(), spec.choices.end(), text) != spec.choices.end();
}

/// Letters and digits alone, lower case.
std::string plain(std::string_view name) {
  std::string text;
  for (const char c : name)
    if (std::isalnum(static_cast<unsigned char>(c)))
      text += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

void convert(const OptionSpec& spec, OptionValue& value) {
  const OptionType wanted = spec.type;
  if (const auto* text = std::get_if<std::string>(&value); text && wanted == OptionType::text) {
    if (std::vector<std::string> meant = choices_meant(spec, *text); meant.size() == 1) value = std::move(meant[0]);
    return;
  }
  if (const auto* integer = std::get_if<std::int64_t>(&value); integer && wanted == OptionType::real)
    value = static_cast<double>(*integer);
  else if (integer && spec.size)
    value = std::to_string(*integer);
  else if (const auto* text = std::get_if<std::string>(&value); text && wanted == OptionType::text_list)
    value = text->empty() ? std::vector<std::string>{} : std::vector<std::string>{*text};  // one for a list of one
  else if (const auto* texts = std::get_if<std::vector<std::string>>(&value);
           texts && texts->empty() && wanted == OptionType::real_list)
    value = std::vector<double>{};
  else if (const auto* reals = std::get_if<std::vector<double>>(&value);
           reals && reals->empty() && wanted == OptionType::text_list)
    value = std::vector<std::string>{};
}

// "Learning-Rate" and "learning_rate" are the same name to a hasty reader.
std::string folded(std::string_view name) {
  std::string out(name);
  for (char& c : out) c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// Optimal string alignment: insertions, deletions, substitutions and swaps of neighbours each cost one.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> before(b.size() + 1), previous(b.size() + 1), current(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) previous[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      std::size_t replaced = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        current[j] = std::min(current[j], before[j - 2] + 1);
    }
    std::swap(before, previous);
    std::swap(previous, current);
  }
  return previous[b.size()];
}

constexpr double kMostBytes = 0x1p62;

/// What a number with a unit says, whatever its size; none: it is not one.
std::optional<double> bytes_of(const std::string& text) {
  static constexpr std::pair<std::string_view, double> kUnits[] = {
      {"", 1},         {"B", 1},    {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30},
      {"TiB", 0x1p40}, {"KB", 1e3}, {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
  double value = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (fault != std::errc()) return std::nullopt;
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  for (const auto& [name, factor] : kUnits)
    if (unit == name) return value * factor;
  return std::nullopt;
}

bool is_beyond_sizes(const std::string& text) { return bytes_of(text).value_or(0) > kMostBytes; }

}  // namespace

std::string_view name_of(OptionType type) {
  static constexpr std::string_view kNames[] = {"boolean", "integer", "real", "text", "list of texts", "list of reals"};
  return kNames[static_cast<std::size_t>(type)];
}

OptionType type_of(const OptionValue& value) { return static_cast<OptionType>(value.index()); }

std::string to_string(const OptionValue& value) {
  struct Speller {
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(std::int64_t v) const { return std::to_string(v); }
    std::string operator()(double v) const { return spell(v); }
    std::string operator()(const std::string& v) const { return quoted(v); }
    std::string operator()(const std::vector<std::string>& v) const { return spell_list(v, quoted); }
    std::string operator()(const std::vector<double>& v) const { return spell_list(v, spell); }
  };
  return std::visit(Speller{}, value);
}

const OptionValue* OptionValues::find(std::string_view key) const {
  auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

const OptionValue& OptionValues::at(std::string_view key) const {
  if (const OptionValue* value = find(key)) return *value;
  fail_internal("option " + std::string(key), "asked for, but neither set nor declared with a default");
}

std::string describe_expected(const OptionSpec& spec) {
  switch (spec.type) {
    case OptionType::boolean: return "true or false";
    case OptionType::integer: return "an integer" + range_text(spec);
    case OptionType::real: return "a number" + range_text(spec);
    case OptionType::real_list: {
      std::string range = range_text(spec);
      return "a list of numbers" + (range.empty() ? range : ", each" + range);
    }
    case OptionType::text:
    case OptionType::text_list: break;
  }
  if (spec.size) return "a size: bytes, or a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB";
  const bool list = spec.type == OptionType::text_list;
  if (spec.choices.empty()) return list ? "a list of texts" : "a text";
  std::string text = list ? "a list out of " : spec.choices.size() > 1 ? "one of " : "";
  for (std::size_t i = 0; i < spec.choices.size(); ++i) text += (i ? ", " : "") + quoted(spec.choices[i]);
  return text;
}

std::vector<std::string> choices_meant(const OptionSpec& spec, const std::string& text) {
  if (std::find(spec.choices.begin(), spec.choices.end(), text) != spec.choices.end()) return {text};
  if (spec.spellings.empty()) return {};
  const std::string wanted = plain(text);
  for (const std::string& choice : spec.choices)
    if (plain(choice) == wanted) return {choice};
  std::vector<std::string> meant;
  for (const auto& [spelling, choice] : spec.spellings)
    if (plain(spelling) == wanted && std::find(meant.begin(), meant.end(), choice) == meant.end())
      meant.push_back(choice);
  return meant;
}

std::optional<std::string> check_option(const OptionSpec& spec, OptionValue& value) {
  convert(spec, value);
  const std::string expected = ", expected " + describe_expected(spec);
  if (type_of(value) != spec.type) return "wrong type, found " + shortened(to_string(value)) + expected;
  auto bad_number = [&](double number) -> std::optional<std::string> {
    if (!std::isfinite(number)) return "not finite, found " + spell(number) + expected;
    if (!within(spec, number)) return "out of range, found " + spell(number) + expected;
    if (!fits_single(number)) return "beyond 32-bit numbers, found " + spell(number) + expected + kSingleRange;
    return std::nullopt;
  };
  auto bad_text = [&](const std::string& text) -> std::optional<std::string> {
    // A path would end there.
    if (text.find('\0') != std::string::npos) return "a zero byte in it, found " + shortened(quoted(text)) + expected;
    if (spec.size && is_beyond_sizes(text))
      return "out of range, found " + shortened(quoted(text)) + ", expected a size of at most 4194304 TiB";
    if (spec.size && !size_in_bytes(text)) return "not a size, found " + shortened(quoted(text)) + expected;
    if (chosen(spec, text)) return std::nullopt;
    const std::string near = nearest_name(text, spec.choices);
    std::string fault = "not a choice, found " + shortened(quoted(text)) + expected;
    return near.empty() ? fault : fault + "; nearest name `" + near + "`";
  };
  if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    // long double holds every int64 exactly, so no rounding moves a value across its bound.
    if (!within(spec, static_cast<long double>(*integer)))
      return "out of range, found " + std::to_string(*integer) + expected;
  } else if (const auto* real = std::get_if<double>(&value)) {
    return bad_number(*real);
  } else if (const auto* text = std::get_if<std::string>(&value)) {
    return bad_text(*text);
  } else if (const auto* reals = std::get_if<std::vector<double>>(&value)) {
    for (double item : *reals)
      if (auto bad = bad_number(item)) return bad;
  } else if (const auto* texts = std::get_if<std::vector<std::string>>(&value)) {
    for (const std::string& item : *texts)
      if (auto bad = bad_text(item)) return bad;
  }
  return std::nullopt;
}

OptionValues default_values(const std::vector<OptionSpec>& specs) {
  OptionValues values;
  for (const OptionSpec& spec : specs)
    if (!spec.required) values.set(spec.key, spec.default_value);
  return values;
}

std::optional<std::int64_t> size_in_bytes(const std::string& text) {
  if (text.empty()) return 0;
  const std::optional<double> bytes = bytes_of(text);
  const bool counts = bytes && (*bytes >= 1 || *bytes == 0) && *bytes <= kMostBytes;  // no NaN
  return counts ? std::optional(static_cast<std::int64_t>(*bytes)) : std::nullopt;
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& known) {
  constexpr std::size_t kLongest = 128;  // keeps the cost of an absurd name bounded; no real name is longer
  if (name.size() > kLongest) return {};
  const std::string wanted = folded(name);
  std::string best;
  std::size_t best_distance = 0;
  for (const std::string& candidate : known) {
    const std::size_t longest = std::max(wanted.size(), candidate.size());
    const std::size_t distance = edit_distance(wanted, folded(candidate));
    const bool near = distance * 3 <= longest + 2 && distance < longest;  // about a third of the letters may differ
    if (near && (best.empty() || distance < best_distance)) best = candidate, best_distance = distance;
  }
  return best;
}

}  // namespace quern
