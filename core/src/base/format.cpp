#include "base/format.h"

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

// One digit after the point while the number is short; a whole number below `base` has none.
std::string short_number(double value, bool scaled) {
  bool whole = !scaled && value == std::floor(value);
  return print(whole || std::fabs(value) >= 99.95 ? "%.0f" : "%.1f", value);
}

template <std::size_t N>
std::string with_unit(double value, double base, const std::array<const char*, N>& units) {
  if (!std::isfinite(value)) return print("%f", value) + units[0];
  std::size_t unit = 0;
  while (unit + 1 < N && std::fabs(value) >= base - (unit == 0 ? 0 : 0.5)) value /= base, ++unit;  // 999.6k is 1.0M
  return short_number(value, unit > 0) + units[unit];
}

std::string pair_of(std::int64_t high, char high_unit, std::int64_t low, char low_unit) {
  char text[64];
  std::snprintf(text, sizeof text, "%lld%c%02lld%c", static_cast<long long>(high), high_unit,
                static_cast<long long>(low), low_unit);
  return text;
}

}  // namespace

std::string format_count(double value) { return with_unit<5>(value, 1000, {"", "k", "M", "B", "T"}); }

std::string format_bytes(double bytes) {
  return with_unit<6>(bytes, 1024, {" B", " KiB", " MiB", " GiB", " TiB", " PiB"});
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
