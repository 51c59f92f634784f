#pragma once
// Patterns of names, as a shell has them: * any text, ? a letter, [...] one of some.

#include <string>

namespace quern {

bool is_pattern(const std::string& text);
bool matches(const std::string& pattern, const std::string& name);

}  // namespace quern
