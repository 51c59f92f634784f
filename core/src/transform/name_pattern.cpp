#include "transform/name_pattern.h"

#include <fnmatch.h>

namespace quern {

bool is_pattern(const std::string& text) { return text.find_first_of("*?[") != std::string::npos; }

bool matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

}  // namespace quern
