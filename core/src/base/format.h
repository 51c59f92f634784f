#pragma once
// Numbers and lists as people read them: numbers have two or three digits, with a unit.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace quern {

/// Three digits: "950", "3.41k", "24.5k", "260k", "1.02M", "1.24B". A whole number below 1000 is exact.
std::string format_count(double value);
/// "512 B", "1.5 GiB".
std::string format_bytes(std::int64_t bytes);
/// "120ms", "3.2s", "45s", "2m10s", "1h05m", "2d03h"; "?" when it is not known (negative or not finite).
std::string format_duration(double seconds);
/// "4.8123"; "nan" and "inf" otherwise.
std::string format_fixed(double value, int digits);
/// "a, b, c"; `none` of an empty list.
std::string format_list(const std::vector<std::string>& texts, std::string_view none = {});

}  // namespace quern
