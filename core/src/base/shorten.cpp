#include "base/shorten.h"

namespace quern {

std::string shortened(std::string text) {
  constexpr std::size_t kLongest = 80;
  if (text.size() <= kLongest) return text;
  std::size_t end = kLongest;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  text.resize(end);
  return text += "...";
}

}  // namespace quern
