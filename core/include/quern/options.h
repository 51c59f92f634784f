#pragma once
// Typed options: declared once, next to the struct that uses them. The declaration validates the TOML, fills the
// struct, prints the resolved config and writes the reference page; plugins export theirs through the manifest.
//
//   struct ConstantOptions { std::int64_t warmup = 100; };
//   inline OptionTable<ConstantOptions> constant_options() {
//     OptionTable<ConstantOptions> t;
//     t.add("warmup", &ConstantOptions::warmup, "steps of linear warm-up").at_least(0);
//     return t;
//   }

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace quern {

/// The types that TOML values and Hugging Face JSON fields map to.
using OptionValue =
    std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>, std::vector<double>>;
enum class OptionType : std::uint8_t { boolean, integer, real, text, text_list, real_list };

std::string_view name_of(OptionType type);
OptionType type_of(const OptionValue& value);
/// As TOML would spell it.
std::string to_string(const OptionValue& value);

/// Another text for a choice; case, blanks and punctuation do not matter.
struct Spelling {
  std::string text, choice;
};

struct OptionSpec {
  std::string key = {};  ///< dots nest: "rope_scaling.factor"
  OptionType type = OptionType::integer;
  OptionValue default_value = {};
  bool required = false;
  double minimum = -std::numeric_limits<double>::infinity();
  double maximum = std::numeric_limits<double>::infinity();
  bool open_minimum = false;              ///< minimum itself is excluded
  std::vector<std::string> choices = {};  ///< of a text; empty: any
  std::vector<Spelling> spellings = {};   ///< of the choices; where there are some, case and punctuation do not matter
  std::string help = {};                  ///< one line: effect and unit
  bool size = false;                      ///< a text that is a number of bytes: "16GiB"; an integer may stand for it
};

/// Values by key, as read and validated, defaults filled in.
class OptionValues {
 public:
  void set(std::string key, OptionValue value) { values_[std::move(key)] = std::move(value); }
  const OptionValue* find(std::string_view key) const;
  template <class T>
  const T& get(std::string_view key) const {
    return std::get<T>(at(key));
  }
  const std::map<std::string, OptionValue, std::less<>>& all() const { return values_; }

 private:
  const OptionValue& at(std::string_view key) const;  ///< a missing key is an internal error
  std::map<std::string, OptionValue, std::less<>> values_;
};

/// "expected an integer from 1 to 8" style text for messages and the reference page.
std::string describe_expected(const OptionSpec& spec);
/// The choices that a text may mean: itself, or the choices that it can spell.
std::vector<std::string> choices_meant(const OptionSpec& spec, const std::string& text);
/// Converts (integer to real, a spelling to its choice) and checks type, range and choices; a text says what is wrong.
std::optional<std::string> check_option(const OptionSpec& spec, OptionValue& value);
/// Defaults of all specs; required ones are absent.
OptionValues default_values(const std::vector<OptionSpec>& specs);
/// Bytes of a size such as "16GiB", "512 MiB" or "800000"; empty: 0. None when it is no size.
std::optional<std::int64_t> size_in_bytes(const std::string& text);
/// The known name nearest to `name` by edit distance, or empty when none is near.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

/// Options of a struct T: each bound to a member whose initialiser is the default.
template <class T>
class OptionTable {
 public:
  /// Refines the option just added.
  class Refine {
   public:
    explicit Refine(OptionSpec& spec) : spec_(spec) {}
    Refine& at_least(double low) {
      spec_.minimum = low;
      return *this;
    }
    Refine& above(double low) {
      spec_.minimum = low;
      spec_.open_minimum = true;
      return *this;
    }
    Refine& at_most(double high) {
      spec_.maximum = high;
      return *this;
    }
    Refine& one_of(std::vector<std::string> choices) {
      spec_.choices = std::move(choices);
      return *this;
    }
    Refine& spelled(std::vector<Spelling> spellings) {
      spec_.spellings = std::move(spellings);
      return *this;
    }
    Refine& size() {
      spec_.size = true;
      return *this;
    }
    Refine& required() {
      spec_.required = true;
      return *this;
    }

   private:
    OptionSpec& spec_;
  };

  /// `Owner` is T or a base of T, so that structs can share options.
  template <class M, class Owner>
  Refine add(const std::string& key, M Owner::*member, std::string help) {
    OptionSpec spec;
    spec.key = key;
    spec.default_value = OptionValue(T{}.*member);
    spec.type = type_of(spec.default_value);
    spec.help = std::move(help);
    specs_.push_back(std::move(spec));
    setters_.push_back([member, key](T& target, const OptionValues& values) {
      if (const OptionValue* value = values.find(key)) target.*member = std::get<M>(*value);
    });
    return Refine(specs_.back());
  }

  const std::vector<OptionSpec>& specs() const { return specs_; }
  /// The struct with `values` in place; keys that are absent keep the member's initialiser.
  T bind(const OptionValues& values) const {
    T target{};
    for (const auto& set : setters_) set(target, values);
    return target;
  }

 private:
  std::vector<OptionSpec> specs_;
  std::vector<std::function<void(T&, const OptionValues&)>> setters_;
};

}  // namespace quern
