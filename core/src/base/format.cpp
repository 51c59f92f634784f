#include "base/format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>

namespace quern {

namespace {

std::string print(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

// Three digits, of which up to `most_decimals` are after the point.
std::string three_digits(double value, int most_decimals) {
  const double size = std::fabs(value);
  const int decimals = size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return format_fixed(value, std::min(decimals, most_decimals));
}

// A whole number below `base` has no decimals.
template <std::size_t N>
std::string with_unit(double value, double base, const std::array<const char*, N>& units, int most_decimals) {
  if (!std::isfinite(value)) return print("%f", value) + units[0];
  if (std::fabs(value) < base && value == std::floor(value)) return print("%.0f", value) + units[0];
  std::size_t unit = 0;
  while (unit + 1 < N && std::fabs(value) >= base - 0.5) value /= base, ++unit;  // 999.6k is 1.00M
  return three_digits(value, most_decimals) + units[unit];
}

std::string pair_of(std::int64_t high, char high_unit, std::int64_t low, char low_unit) {
  char text[64];
  std::snprintf(text, sizeof text, "%lld%c%02lld%c", static_cast<long long>(high), high_unit,
                static_cast<long long>(low), low_unit);
  return text;
}

}  // namespace

std::string format_count(double value) { return with_unit<5>(value, 1000, {"", "k", "M", "B", "T"}, 2); }

std::string format_bytes(std::int64_t bytes) {
  return with_unit<6>(static_cast<double>(bytes), 1024, {" B", " KiB", " MiB", " GiB", " TiB", " PiB"}, 1);
}

std::string format_duration(double seconds) {
  constexpr double kLongest = 1e12;  // 30,000 years; keeps the integers below in range
  if (!(seconds >= 0) || seconds > kLongest) return "?";
  if (seconds < 0.9995) return print("%.0fms", seconds * 1000);
  if (seconds < 9.95) return print("%.1fs", seconds);
  auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 60) return std::to_string(whole) + "s";
  if (whole < 3600) return pair_of(whole / 60, 'm', whole % 60, 's');
  if (whole < 86400) return pair_of(whole / 3600, 'h', whole % 3600 / 60, 'm');
  return pair_of(whole / 86400, 'd', whole % 86400 / 3600, 'h');
}

std::string format_fixed(double value, int digits) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value < 0 ? "-inf" : "inf";
  char text[400];  // the largest double has 309 digits before the point
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string format_list(const std::vector<std::string>& texts, std::string_view none) {
  std::string list;
  for (const std::string& text : texts) list.append(list.empty() ? "" : ", ").append(text);
  return texts.empty() ? std::string(none) : list;
}

}  // namespace quern
