#include "checkpoint/names.h"

#include <algorithm>
#include <cstdint>

namespace quern {

namespace {

constexpr std::size_t kMostListed = 8;

// Bytes of the UTF-8 character at the start of `text`; 0: none, or a control character.
std::size_t printing_character(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
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

}  // namespace

std::string printable(std::string_view text, std::size_t longest) {
  const bool cut = text.size() > longest;
  text = text.substr(0, longest);
  std::string out;
  while (!text.empty()) {
    const std::size_t size = printing_character(text);
    out += size > 0 ? text.substr(0, size) : "?";
    text.remove_prefix(std::max<std::size_t>(size, 1));
  }
  return cut ? out + "..." : out;
}

std::string quote_name(std::string_view name) { return printable(name).insert(0, 1, '\'').append(1, '\''); }

std::string list_names(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMostListed); ++i)
    text.append(i == 0 ? "" : ", ").append(quote_name(names[i]));
  if (names.size() > kMostListed) text += " and " + std::to_string(names.size() - kMostListed) + " more";
  return text;
}

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

}  // namespace quern
