#include "base/shorten.h"

#include <algorithm>
#include <cstdint>

namespace quern {

namespace {

// Bytes of the UTF-8 character at the start of `text`; 0: none, or a control character
// other than a line's end.
std::size_t printing_character(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return first == '\n' || (first >= 0x20 && first != 0x7f) ? 1 : 0;
  const std::size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc0 || first > 0xf4 || text.size() < size) return 0;
  std::uint32_t code = first & (0x7fu >> size);
  for (std::size_t i = 1; i < size; ++i) {
    const auto next = static_cast<unsigned char>(text[i]);
    if ((next & 0xc0) != 0x80) return 0;
    code = code << 6 | (next & 0x3fu);
  }
  const std::uint32_t least = size == 4 ? 0x10000 : size == 3 ? 0x800 : 0xa0;
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  return code >= least && code <= 0x10ffff && !surrogate ? size : 0;
}

// The start of the UTF-8 character that byte `at` is in.
std::size_t character_start(std::string_view text, std::size_t at) {
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) --at;
  return at;
}

}  // namespace

std::string shortened(std::string text) {
  constexpr std::size_t kLongest = 80;
  if (text.size() <= kLongest) return text;
  text.resize(character_start(text, kLongest));
  return text += "...";
}

std::string bounded(std::string_view text, std::size_t most) {
  if (text.size() <= most) return std::string(text);
  const std::size_t end = character_start(text, most / 2), begin = character_start(text, text.size() - most / 2);
  return std::string(text.substr(0, end)).append("...").append(text.substr(begin));
}

std::string without_control(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t size = printing_character(text);
    out += size > 0 ? text.substr(0, size) : "?";
    text.remove_prefix(std::max<std::size_t>(size, 1));
  }
  return out;
}

std::string printable(std::string_view text, std::size_t longest) {
  std::string out = without_control(text.substr(0, longest));
  std::replace(out.begin(), out.end(), '\n', '?');
  return text.size() > longest ? out + "..." : out;
}

std::string quote_name(std::string_view name) { return printable(name).insert(0, 1, '\'').append(1, '\''); }

}  // namespace quern
