#include "conformance/check.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include "conformance/contracts.h"
#include "conformance/expected/expected_values.h"
#include "conformance/harness/plugin_heap.h"

namespace quern::conformance {

namespace {

/// A setting is for every implementation of a file that has the option; one that none has is a config error.
void need_options(const std::vector<PluginEntry>& entries, const CheckOptions& options) {
  for (const std::string& setting : options.settings) {
    const std::string key = key_of(setting);
    if (std::any_of(entries.begin(), entries.end(),
                    [&](const PluginEntry& entry) { return has_option(*entry.factory, key); }))
      continue;
    std::vector<std::string> names;
    for (const PluginEntry& entry : entries)
      for (const OptionSpec& spec : entry.factory->options) names.push_back(spec.key);
    const std::string near = nearest_name(key, names);
    throw Error(ErrorCode::config, {.where = "quern plugins check --set " + setting,
                                    .what = "no implementation that is checked has this option",
                                    .found = key,
                                    .expected = "key=value of an option of theirs",
                                    .next = near.empty() ? near : "nearest name `" + near + "`"});
  }
}

/// What the plugin takes by `new` is guarded from here on; all that are checked are of one file. Returns why it is not,
/// an empty text if it is, and nothing for one that is built in.
std::optional<std::string> guard_heap(const PluginHost& host, const Factory& factory) {
  const std::string origin = host.origin(factory.kind, factory.id);
  for (const auto& plugin : host.loaded())
    if (origin.ends_with(plugin->path.string())) return guard_heap_of(plugin->path);
  return std::nullopt;
}

/// Whether the contracts before ran with the guard.
std::string guarded(const std::string& reason) {
  if (!reason.empty()) throw Skipped{reason};
  const TakenBlocks taken = taken_blocks();
  std::string text = std::to_string(taken.guarded) + " blocks";
  if (taken.too_large > 0) text += "; " + std::to_string(taken.too_large) + " larger ones are not";
  if (taken.without_room > 0) text += "; " + std::to_string(taken.without_room) + " are not, beyond the most at a time";
  return text;
}

void check_kind(Report& report, const Subject& subject) {
  constexpr std::pair<const char*, void (*)(Report&, const Subject&)> kContracts[] = {
      {kPluginKind<PrecisionBackend>, check_precision},
      {kPluginKind<Device>, check_device},
      {kPluginKind<Model>, check_model},
      {kPluginKind<Dataset>, check_dataset},
      {kPluginKind<LogSink>, check_log_sink},
      {kPluginKind<Communicator>, check_communicator},
      {kPluginKind<OffloadStore>, check_offload_store},
      {kPluginKind<Optimizer>, check_optimizer},
      {kPluginKind<Schedule>, check_schedule}};
  for (const auto& [kind, contracts] : kContracts)
    if (subject.factory.kind == kind) return contracts(report, subject);
  report.no_contracts(subject.factory.kind);
}

void check_factory(Report& report, PluginHost& host, const Factory& factory, const CheckOptions& options) {
  report.begin(factory.kind + " \"" + factory.id + "\" (" + host.origin(factory.kind, factory.id) + ")");
  const Subject subject{host, factory, values_of(host, factory, options), options};
  const std::size_t before = report.findings().size();
  check_description(report, subject);
  // Without an instance the contracts of the kind would all say the same.
  const auto& findings = report.findings();
  if (std::all_of(findings.begin() + static_cast<std::ptrdiff_t>(before), findings.end(), [](const Finding& finding) {
        return finding.contract != "made" || finding.verdict == Verdict::holds;
      })) {
    check_kind(report, subject);
    check_expected(report, subject);
  }
}

}  // namespace

Report check(PluginHost& host, const std::string& what, const CheckOptions& options, Progress* progress) {
  Report report(progress, options.only);
  std::vector<PluginEntry> entries;
  const std::size_t slash = what.find('/');
  const std::string kind = what.substr(0, slash);
  const auto kinds = plugin_kinds();
  std::error_code ignored;
  if (slash != std::string::npos && std::find(kinds.begin(), kinds.end(), kind) != kinds.end() &&
      !std::filesystem::exists(what, ignored)) {
    const Factory& factory = host.require(kind, what.substr(slash + 1));
    entries.push_back({kind, factory.id, &factory, nullptr, {}});
  } else {
    report.begin(what);
    bool loads = report.needed("loads", [&] {
      try {
        entries = host.load_file(what);
      } catch (const Error& error) {
        report.refuse();
        broken("the file", error.what(), "a plugin that can be loaded");
      }
      const LoadedPlugin& plugin = *entries[0].plugin;
      return plugin.name + " " + plugin.version + ", SDK " + std::to_string(kSdkVersion) + ", " +
             std::to_string(entries.size()) + (entries.size() == 1 ? " implementation" : " implementations");
    });
    if (!loads) return report;
    report.contract("says what it is", [&]() -> std::string {
      const LoadedPlugin& plugin = *entries[0].plugin;
      need(!plugin.version.empty(), "manifest.version", "nothing", "a version");
      need(!plugin.licence.empty(), "manifest.licence", "nothing", "a licence");
      return "licence " + plugin.licence;
    });
  }
  const std::optional<std::string> unguarded = guard_heap(host, *entries[0].factory);
  need_options(entries, options);
  for (const PluginEntry& entry : entries) check_factory(report, host, *entry.factory, options);
  if (unguarded) report.contract("guarded blocks", [&] { return guarded(*unguarded); });
  if (report.count(Verdict::broken) == 0) report.need_all_named();
  return report;
}

}  // namespace quern::conformance
