#include "checkpoint/names.h"
#include "base/shorten.h"

#include <algorithm>

namespace quern {

namespace {

constexpr std::size_t kMostListed = 8;

}  // namespace

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
