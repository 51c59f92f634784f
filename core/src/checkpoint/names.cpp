#include "checkpoint/names.h"

#include <algorithm>

namespace quern {

namespace {
constexpr std::size_t kMostListed = 8;
}

std::string printable(std::string_view text, std::size_t longest) {
  std::string out(text.substr(0, longest));
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  if (text.size() > longest) out += "...";
  return out;
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
