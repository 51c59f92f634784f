#pragma once
// Compile-time constants of an op: numbers, words and number lists by name ("eps", "heads", "inverse_frequencies").

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace quern {

using Attribute = std::variant<std::int64_t, double, std::string, std::vector<double>>;

class Attributes {
 public:
  Attributes() = default;
  Attributes(std::initializer_list<std::pair<const std::string, Attribute>> list) : map_(list) {}

  bool has(std::string_view name) const { return map_.find(name) != map_.end(); }
  void set(std::string name, Attribute value) { map_[std::move(name)] = std::move(value); }

  /// The attribute's value; a missing name or another type is an internal error that names the attribute.
  std::int64_t integer(std::string_view name) const;
  double real(std::string_view name) const;
  const std::string& word(std::string_view name) const;
  const std::vector<double>& list(std::string_view name) const;
  std::int64_t integer_or(std::string_view name, std::int64_t otherwise) const {
    return has(name) ? integer(name) : otherwise;
  }
  double real_or(std::string_view name, double otherwise) const { return has(name) ? real(name) : otherwise; }

  const std::map<std::string, Attribute, std::less<>>& all() const { return map_; }
  bool operator==(const Attributes&) const = default;

 private:
  std::map<std::string, Attribute, std::less<>> map_;
};

std::string to_string(const Attribute& value);

}  // namespace quern
