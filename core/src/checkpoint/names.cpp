#include "checkpoint/names.h"

#include <algorithm>

#include "base/shorten.h"

namespace quern {

namespace {

constexpr std::size_t kMostListed = 8;

}  // namespace

std::string printable(std::string_view text, std::size_t longest) {
  std::string out = without_control(text.substr(0, longest));
  std::replace(out.begin(), out.end(), '\n', '?');
  return text.size() > longest ? out + "..." : out;
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
         printable(name, name.size()) == name;
}

}  // namespace quern
