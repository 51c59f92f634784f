#include "quern/attributes.h"

#include <cstdio>

#include "quern/error.h"

namespace quern {

namespace {

template <class T>
const T& get(const std::map<std::string, Attribute, std::less<>>& map, std::string_view name) {
  auto it = map.find(name);
  if (it == map.end()) fail_internal("attribute " + std::string(name), "missing");
  const T* value = std::get_if<T>(&it->second);
  if (!value) fail_internal("attribute " + std::string(name), "has another type: " + to_string(it->second));
  return *value;
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

}  // namespace

std::int64_t Attributes::integer(std::string_view name) const { return get<std::int64_t>(map_, name); }
double Attributes::real(std::string_view name) const { return get<double>(map_, name); }
const std::string& Attributes::word(std::string_view name) const { return get<std::string>(map_, name); }
const std::vector<double>& Attributes::list(std::string_view name) const {
  return get<std::vector<double>>(map_, name);
}

std::string to_string(const Attribute& value) {
  if (auto* integer = std::get_if<std::int64_t>(&value)) return std::to_string(*integer);
  if (auto* real = std::get_if<double>(&value)) return number(*real);
  if (auto* word = std::get_if<std::string>(&value)) return *word;
  const auto& list = std::get<std::vector<double>>(value);
  std::string text = "[";
  for (std::size_t i = 0; i < list.size() && i < 2; ++i) text += (i ? ", " : "") + number(list[i]);
  if (list.size() > 2) text += ", .. " + std::to_string(list.size()) + " numbers";
  return text + "]";
}

}  // namespace quern
