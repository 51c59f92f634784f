#include "conformance/expected/expected_values.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>

#include <nlohmann/json.hpp>

#include "conformance/expected/observations.h"
#include "conformance/harness/trial.h"

namespace quern::conformance {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAbout =
    "What this plugin does with these options. `quern plugins check PLUGIN --expect FILE` compares, --write writes it "
    "again; add cases by their \"set\". A case has what differs from the first; null: it is not there. "
    "docs/conformance.md";
constexpr double kNoise = 1e-6;  ///< of numbers that should be zero

struct Case {
  std::vector<std::string> settings;
  Observed gives;
  std::string refused;  ///< the error's text; empty: it is made
};

[[noreturn]] void bad_file(const std::string& path, const std::string& what, const std::string& expected) {
  throw Error(ErrorCode::config, {.where = path,
                                  .what = what,
                                  .expected = expected,
                                  .next = "write it with quern plugins check PLUGIN --expect FILE --write"});
}

/// As a JSON file can have it.
std::string printable(const std::string& text) {
  return Json::parse(Json(text).dump(-1, ' ', false, Json::error_handler_t::replace)).get<std::string>();
}

/// Without where, which has the plugin's path.
std::string reason_of(const Error& error) {
  const ErrorDetail& detail = error.detail();
  std::string text = detail.what;
  if (!detail.found.empty()) text += ": found " + detail.found;
  if (!detail.expected.empty()) text += ", expected " + detail.expected;
  return detail.next.empty() ? text : text + "; " + detail.next;
}

/// What an option is when nobody sets it, and what it may be.
std::string text_of(const OptionSpec& spec) {
  auto bound = [](double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.12g", value);
    return std::string(text);
  };
  std::string text = spec.required ? "required" : to_string(spec.default_value);
  if (spec.minimum > -INFINITY) text += (spec.open_minimum ? ", above " : ", at least ") + bound(spec.minimum);
  if (spec.maximum < INFINITY) text += ", at most " + bound(spec.maximum);
  for (const std::string& choice : spec.choices) text += (&choice == spec.choices.data() ? ", one of " : " ") + choice;
  return text;
}

Case observed(const Subject& subject, const Observer& observer, const std::vector<std::string>& settings) {
  Case one{settings, {}, {}};
  CheckOptions options = subject.options;
  for (const std::string& setting : settings) {
    need(has_option(subject.factory, key_of(setting)), "case " + setting, "no such option", "one of the plugin's");
    options.settings.push_back(setting);
  }
  try {
    const Subject changed{subject.host, subject.factory, values_of(subject.host, subject.factory, options), options};
    one.gives = observer.observe(changed);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal || settings.empty()) throw;
    one.refused = printable(reason_of(error));
  }
  if (one.refused.empty())
    for (const OptionSpec& spec : subject.factory.options) one.gives["option " + spec.key] = text_of(spec);
  for (auto& [name, value] : one.gives) {
    if (auto* text = std::get_if<std::string>(&value)) *text = printable(*text);
    if (auto* numbers = std::get_if<std::vector<double>>(&value))
      for (double number : *numbers) need(std::isfinite(number), name, "a number that is not finite", "a finite one");
  }
  return one;
}

// ---- the file ----

Json read_file(const std::string& path, bool may_lack) {
  std::ifstream file(path);
  if (!file && may_lack) return Json::object();
  if (!file) bad_file(path, "cannot be read", "a file of expected values");
  Json json = Json::parse(file, nullptr, false);
  if (!json.is_object()) bad_file(path, "is no JSON object", "a file of expected values");
  return json;
}

std::vector<Case> cases_of(const Json& entry, const std::string& path) {
  std::vector<Case> cases;
  try {
    for (const Json& from : entry.at("cases")) {
      Case& one = cases.emplace_back();
      one.settings = from.at("set").get<std::vector<std::string>>();
      one.refused = from.value("refused", "");
      if (cases.size() > 1) one.gives = cases[0].gives;
      const Json gives = from.value("gives", Json::object());
      for (const auto& [name, value] : gives.items()) {
        if (value.is_null())
          one.gives.erase(name);
        else if (value.is_string())
          one.gives[name] = value.get<std::string>();
        else
          one.gives[name] = value.get<std::vector<double>>();
      }
    }
  } catch (const Json::exception& error) {
    bad_file(path, error.what(), "\"cases\", each with \"set\", a list of \"key=value\", and \"gives\" or \"refused\"");
  }
  if (cases.empty()) bad_file(path, "has no cases", "one at least");
  return cases;
}

Json json_of(const std::variant<std::vector<double>, std::string>& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  Json list = Json::array();
  for (double number : std::get<std::vector<double>>(value)) {
    char text[32];
    std::snprintf(text, sizeof text, "%.7g", number);
    list.push_back(Json::parse(text));
  }
  return list;
}

Json json_of(const std::vector<Case>& cases, double tolerance) {
  Json list = Json::array();
  for (const Case& one : cases) {
    Json to{{"set", one.settings}};
    if (!one.refused.empty()) {
      to["refused"] = one.refused;
    } else {
      const bool first = &one == cases.data();
      to["gives"] = Json::object();
      for (const auto& [name, value] : one.gives)
        if (const auto known = cases[0].gives.find(name);
            first || known == cases[0].gives.end() || json_of(known->second) != json_of(value))
          to["gives"][name] = json_of(value);
      for (const auto& [name, value] : cases[0].gives)
        if (!one.gives.contains(name)) to["gives"][name] = nullptr;
    }
    list.push_back(std::move(to));
  }
  return {{"tolerance", tolerance}, {"cases", std::move(list)}};
}

/// A line for each name: what a review reads.
void write_file(const std::string& path, const Json& json) {
  std::string text = "{\n";
  for (const auto& [key, entry] : json.items()) {
    text += " " + Json(key).dump() + ": ";
    if (!entry.is_object()) {
      text += entry.dump() + ",\n";
      continue;
    }
    text += "{\n  \"tolerance\": " + entry["tolerance"].dump() + ",\n  \"cases\": [";
    for (const Json& one : entry["cases"]) {
      text += (&one == &entry["cases"].front() ? "\n   {\"set\": " : ",\n   {\"set\": ") + one["set"].dump();
      if (one.contains("refused")) text += ", \"refused\": " + one["refused"].dump();
      if (one.contains("gives")) {
        std::string lines;
        for (const auto& [name, value] : one["gives"].items())
          lines += (lines.empty() ? "\n    " : ",\n    ") + Json(name).dump() + ": " + value.dump();
        text += ", \"gives\": {" + lines + "}";
      }
      text += "}";
    }
    text += "]},\n";
  }
  text.erase(text.size() - 2);
  std::ofstream file(path);
  file << text << "\n}\n" << std::flush;
  if (!file) throw Error(ErrorCode::resources, {.where = path, .what = "cannot be written"});
}

/// As given, and with other values of options, one at a time.
std::vector<std::vector<std::string>> first_cases(const Subject& subject) {
  std::vector<std::vector<std::string>> all{{}};
  for (const OptionSpec& spec : subject.factory.options) {
    const OptionValue* now = subject.values.find(spec.key);
    if (!now || spec.key == "config") continue;
    std::vector<OptionValue> values = other_values(spec, *now);
    if (spec.type != OptionType::text && values.size() > 1) values.resize(1);
    for (const std::int64_t least : {0, 1})  // which is often off, and the least that is on
      if (OptionValue value = least; spec.type == OptionType::integer && spec.minimum == 0 && value != *now &&
                                     std::ranges::find(values, value) == values.end())
        values.push_back(value);
    for (const OptionValue& value : values) all.push_back({spec.key + "=" + to_string(value)});
  }
  return all;
}

std::string written(const Subject& subject, const Observer& observer, const std::string& name) {
  const std::string& path = subject.options.expected;
  Json json = read_file(path, true);
  std::vector<std::vector<std::string>> wanted;
  double tolerance = observer.tolerance;
  if (json.contains(name)) {
    for (const Case& one : cases_of(json[name], path)) wanted.push_back(one.settings);
    tolerance = json[name].value("tolerance", tolerance);
  } else {
    wanted = first_cases(subject);
  }
  std::vector<Case> cases;
  cases.reserve(wanted.size());
  for (const auto& settings : wanted) cases.push_back(observed(subject, observer, settings));
  json["about"] = kAbout;
  json[name] = json_of(cases, tolerance);
  write_file(path, json);
  return "written: " + std::to_string(cases.size()) + " cases; review them";
}

// ---- comparison ----

std::string shown(const std::vector<double>& numbers) {
  std::string text;
  for (double one : numbers) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.7g", one);  // a difference beyond the tolerance shows
    text += (text.empty() ? "" : ", ") + std::string(digits);
  }
  return text;
}

void compare(const Case& got, const Case& want, double tolerance, const std::string& path) {
  std::string of;
  for (const std::string& setting : want.settings) of += (of.empty() ? " with " : ", ") + setting;
  need(got.refused == want.refused, "an instance" + of, got.refused.empty() ? "made" : "refused: " + got.refused,
       (want.refused.empty() ? "made" : "refused: " + want.refused) + ", as " + path + " says");
  if (!want.refused.empty()) return;
  for (const auto& [name, value] : got.gives)
    need(want.gives.contains(name), name + of, "there", "nothing of that name, as " + path + " says");
  for (const auto& [name, value] : want.gives) {
    const auto found = got.gives.find(name);
    need(found != got.gives.end(), name + of, "nothing", "what " + path + " says");
    if (const auto* text = std::get_if<std::string>(&value)) {
      const auto* now = std::get_if<std::string>(&found->second);
      need(now && *now == *text, name + of, now ? "\"" + *now + "\"" : "numbers", "\"" + *text + "\"");
      continue;
    }
    const auto& numbers = std::get<std::vector<double>>(value);
    const auto* now = std::get_if<std::vector<double>>(&found->second);
    bool same = now && now->size() == numbers.size();
    double largest = 0;
    for (double one : numbers) largest = std::max(largest, std::fabs(one));
    for (std::size_t i = 0; same && i < numbers.size(); ++i)
      same = std::fabs((*now)[i] - numbers[i]) <= tolerance * largest + kNoise;
    need(same, name + of, now ? shown(*now) : "a text",
         shown(numbers) + " within " + number(tolerance * largest + kNoise) + ", as " + path + " says");
  }
}

std::string compared(const Subject& subject, const Observer& observer, const std::string& name) {
  const std::string& path = subject.options.expected;
  const Json json = read_file(path, false);
  if (!json.contains(name)) bad_file(path, "says nothing of " + name, "its expected values");
  const std::vector<Case> cases = cases_of(json[name], path);
  const double tolerance = json[name].value("tolerance", observer.tolerance);
  std::size_t values = 0;
  for (const Case& want : cases) {
    compare(observed(subject, observer, want.settings), want, tolerance, path);
    values += want.gives.size();
  }
  return std::to_string(cases.size()) + " cases, " + std::to_string(values) + " values";
}

}  // namespace

void check_expected(Report& report, const Subject& subject) {
  if (subject.options.expected.empty()) return;
  report.needed("expected values", [&]() -> std::string {
    const Observer observer = observer_of(subject.factory.kind);
    const std::string name = subject.factory.kind + "/" + subject.factory.id;
    if (!observer.observe) throw Skipped{"the kit observes nothing of a " + subject.factory.kind};
    return subject.options.write_expected ? written(subject, observer, name) : compared(subject, observer, name);
  });
}

}  // namespace quern::conformance
