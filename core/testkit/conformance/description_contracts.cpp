// Of every plugin: its options are well described and checked, and it can be made from them.
#include <cmath>

#include "config/resolve.h"
#include "conformance/contracts.h"
#include "conformance/harness/growth.h"
#include "plugin/plugin_file.h"

namespace quern::conformance {

namespace {

std::string count_of(std::size_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string described(const Subject& subject) {
  need(!subject.factory.summary.empty(), "summary", "nothing", "a line for `quern plugins list`");
  if (std::string faults = option_faults(subject.factory.options); !faults.empty())
    broken("options", faults, "none of these");
  for (const OptionSpec& spec : subject.factory.options) {
    need(!spec.help.empty(), "help of option " + spec.key, "nothing", "what it does, with its unit");
    need(spec.help.find('\n') == std::string::npos, "help of option " + spec.key, "several lines", "one");
    need(spec.minimum <= spec.maximum, "range of option " + spec.key,
         number(spec.minimum) + " to " + number(spec.maximum), "an ascending range");
    need(spec.choices.empty() || spec.type == OptionType::text, "choices of option " + spec.key,
         "choices of " + std::string(name_of(spec.type)), "choices of a text only");
    need(spec.required || type_of(spec.default_value) == spec.type, "default of option " + spec.key,
         std::string(name_of(type_of(spec.default_value))), std::string(name_of(spec.type)));
  }
  return count_of(subject.factory.options.size(), "option");
}

/// Resolves a config with one more line in the plugin's own table.
std::string refused_line(const Subject& subject, const std::string& line, const std::string& what) {
  const Factory& factory = subject.factory;
  SectionSchema schema;
  schema.name = schema.plugin_kind = factory.kind;
  schema.default_id = factory.id;
  return need_refusal(what, ErrorCode::config, [&] {
    resolve(ConfigDocument::parse("[" + factory.kind + "." + factory.id + "]\n" + line + "\n", "check.toml"), {schema},
            subject.host);
  });
}

std::string wrong_values_refused(const Subject& subject) {
  std::string text = refused_line(subject, "no_such_option = 1", "an unknown key");
  need(text.find("no_such_option") != std::string::npos, "the refusal of an unknown key", text, "the key's name in it");
  std::size_t tried = 1;
  for (const OptionSpec& spec : subject.factory.options) {
    auto refuses = [&](OptionValue value, const std::string& what) {
      const std::string shown = to_string(value);
      ++tried;
      need(check_option(spec, value).has_value(), "option " + spec.key + " given " + what, shown + " accepted",
           describe_expected(spec));
    };
    if (spec.type != OptionType::boolean) refuses(true, "a boolean");
    if (spec.type == OptionType::boolean || spec.type == OptionType::integer) refuses(std::string("x"), "a text");
    const bool whole = spec.type == OptionType::integer;
    auto outside = [&](double value) {
      refuses(whole ? OptionValue(static_cast<std::int64_t>(value)) : OptionValue(value), "a value out of its range");
    };
    if (!whole && spec.type != OptionType::real) continue;
    if (std::isfinite(spec.minimum)) outside(spec.minimum - std::max(1.0, std::fabs(spec.minimum) * 0.01));
    if (std::isfinite(spec.maximum)) outside(spec.maximum + std::max(1.0, std::fabs(spec.maximum) * 0.01));
  }
  return count_of(tried, "value");
}

/// Makes an instance and drops it. Nothing of an Error is wrong here but its coming from a fault of the plugin.
void make_any(const Subject& subject, const OptionValues& values) {
  PluginHost& host = subject.host;
  const std::string& id = subject.factory.id;
  auto make = [&](auto* kind) { host.create<std::remove_pointer_t<decltype(kind)>>(id, values); };
  const std::string& kind = subject.factory.kind;
  if (kind == kPluginKind<Device>) make(static_cast<Device*>(nullptr));
  if (kind == kPluginKind<Model>) make(static_cast<Model*>(nullptr));
  if (kind == kPluginKind<PrecisionBackend>) make(static_cast<PrecisionBackend*>(nullptr));
  if (kind == kPluginKind<Communicator>) make(static_cast<Communicator*>(nullptr));
  if (kind == kPluginKind<OffloadStore>) make(static_cast<OffloadStore*>(nullptr));
  if (kind == kPluginKind<Optimizer>) make(static_cast<Optimizer*>(nullptr));
  if (kind == kPluginKind<Schedule>) make(static_cast<Schedule*>(nullptr));
  if (kind == kPluginKind<Dataset>) make(static_cast<Dataset*>(nullptr));
  if (kind == kPluginKind<LogSink>) make(static_cast<LogSink*>(nullptr));
}

/// Every bound and choice that an option states makes an instance, or is refused for how it goes with the others.
std::string stated_values_work(const Subject& subject) {
  std::size_t made = 0, refused = 0;
  for (const OptionSpec& spec : subject.factory.options) {
    std::vector<OptionValue> values;
    for (const std::string& choice : spec.choices) values.emplace_back(choice);
    if (spec.type == OptionType::boolean) values = {OptionValue(true), OptionValue(false)};
    for (double bound : {spec.minimum, spec.maximum}) {
      if (!std::isfinite(bound) || (bound == spec.minimum && spec.open_minimum)) continue;
      if (spec.type == OptionType::integer) values.emplace_back(static_cast<std::int64_t>(bound));
      if (spec.type == OptionType::real) values.emplace_back(bound);
    }
    for (const OptionValue& value : values) {
      OptionValues changed = subject.values;
      changed.set(spec.key, value);
      try {
        make_any(subject, changed);
        ++made;
      } catch (const Error& error) {
        const std::string what = spec.key + " = " + to_string(value);
        need(error.code() != ErrorCode::internal, what, error.what(), "an instance, or a refusal as a user's mistake");
        ++refused;
      }
    }
  }
  return std::to_string(made) + " made, " + std::to_string(refused) + " refused with a reason";
}

}  // namespace

void check_description(Report& report, const Subject& subject) {
  report.contract("describes itself", [&] { return described(subject); });
  report.contract("refuses wrong options", [&] { return wrong_values_refused(subject); });
  report.needed("made", [&] {
    make_any(subject, subject.values);
    const std::string settings = settings_text(subject);
    return settings.empty() ? std::string("from its defaults") : "with " + settings;
  });
  report.contract("stated values work", [&] { return stated_values_work(subject); });
  report.contract("instances leave nothing", [&] {
    return need_no_growth("an instance made and dropped", [&] { make_any(subject, subject.values); });
  });
}

}  // namespace quern::conformance
