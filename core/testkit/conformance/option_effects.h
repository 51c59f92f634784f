#pragma once
// Whether a plugin's options do anything.

#include <string>

#include "conformance/contracts.h"

namespace quern::conformance {

/// Whether another value of the option changes the result, or is refused; of an option without other values: true.
template <class Result>
bool option_has_effect(const Subject& subject, const OptionSpec& spec, const Result& result) {
  const auto plain = result(subject);
  bool made = false;
  for (const OptionValue& value : other_values(spec, *subject.values.find(spec.key))) {
    Subject other = subject;
    other.values.set(spec.key, value);
    try {
      if (result(other) != plain) return true;
      made = true;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::internal) throw;
      return true;  // a refusal is an effect
    }
  }
  return !made;
}

/// Each option changes what a training makes at some other value, or has one for which it refuses to. Some act beside
/// one choice of another option alone.
template <class Result>
std::string options_have_effect(const Subject& subject, const Result& result) {
  std::size_t tried = 0;
  for (const OptionSpec& spec : subject.factory.options) {
    if (!subject.values.find(spec.key)) continue;
    bool changes = option_has_effect(subject, spec, result);
    for (const OptionSpec& choice : subject.factory.options) {
      if (choice.choices.empty() || choice.key == spec.key || !subject.values.find(choice.key)) continue;
      for (const OptionValue& value : other_values(choice, *subject.values.find(choice.key))) {
        if (changes) break;
        Subject beside = subject;
        beside.values.set(choice.key, value);
        changes = option_has_effect(beside, spec, result);
      }
    }
    need(changes, "option " + spec.key, "the same bits whatever its value", "an effect");
    ++tried;
  }
  return std::to_string(tried) + " options";
}

}  // namespace quern::conformance
