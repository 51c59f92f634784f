// quern plugins: what can be selected, from where, and with which options.
#include <algorithm>
#include <iostream>

#include <boost/program_options/value_semantic.hpp>

#include "commands.h"
#include "config/reference.h"
#include "conformance/check.h"
#include "quern/error.h"
#include "train/run_schemas.h"

namespace quern::cli {

namespace po = boost::program_options;

namespace {

int list(const Arguments& arguments) {
  po::variables_map values;
  if (!parse("quern plugins list", po::options_description("options"), {}, arguments, values)) return 0;
  PluginHost host = run_host();
  for (std::string_view kind : plugin_kinds())
    for (const PluginEntry& entry : host.list(kind)) {
      std::cout << kind << " " << entry.id << ": ";
      if (entry.factory)
        std::cout << entry.factory->summary << " (" << host.origin(kind, entry.id) << ")\n";
      else
        std::cout << "CANNOT BE LOADED: " << entry.refusal << "\n";
    }
  std::cout << "searched:\n";
  for (const auto& folder : host.folders()) std::cout << "  " << folder.string() << "\n";
  return 0;
}

int info(const Arguments& arguments) {
  po::variables_map values;
  po::options_description options("options");
  options.add_options()("path", po::value<std::string>()->default_value("")->value_name("FILE"),
                        "the plugin's file, instead of searching");
  if (!parse("quern plugins info KIND ID [--path FILE]", options, {"KIND", "ID"}, arguments, values)) return 0;
  const auto& kind = values["KIND"].as<std::string>();
  const auto& id = values["ID"].as<std::string>();
  const auto kinds = plugin_kinds();
  if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) {
    const std::vector<std::string> names(kinds.begin(), kinds.end());
    std::string known;
    for (const std::string& name : names) known.append(known.empty() ? "" : ", ").append(name);
    const std::string near = nearest_name(kind, names);
    throw Error(ErrorCode::config, {.where = "quern plugins info",
                                    .what = "no such kind of plugin",
                                    .found = to_string(OptionValue(kind)),
                                    .expected = "one of " + known,
                                    .next = near.empty() ? near : "nearest name `" + near + "`"});
  }
  PluginHost host = run_host();
  const Factory& factory = host.require(kind, id, values["path"].as<std::string>());
  std::cout << kind << " " << id << ": " << factory.summary << "\n"
            << "from: " << host.origin(kind, id) << "\n";
  for (const auto& plugin : host.loaded()) std::cout << "licence: " << plugin->licence << "\n";
  std::cout << "\n" << options_table(factory.options);
  return 0;
}

int check(const Arguments& arguments) {
  po::variables_map values;
  po::options_description options("options");
  options.add_options()("set", po::value<std::vector<std::string>>()->composing()->value_name("key=value"),
                        "set an option of the plugin; may be repeated")(
      "device", po::value<std::string>()->default_value("cpu")->value_name("ID"),
      "device that communicators and stores work with")("ordinal", po::value<int>()->default_value(0)->value_name("N"),
                                                        "hardware unit of the device");
  if (!parse("quern plugins check PLUGIN [--set key=value] (PLUGIN: a file, or KIND/ID)", options, {"PLUGIN"},
             arguments, values))
    return 0;
  conformance::CheckOptions how;
  if (values.count("set")) how.settings = values["set"].as<std::vector<std::string>>();
  how.device = values["device"].as<std::string>();
  how.ordinal = values["ordinal"].as<int>();
  PluginHost host = run_host();
  const conformance::Report report = conformance::check(host, values["PLUGIN"].as<std::string>(), how);
  std::cout << report.text();
  return report.exit_code();
}

constexpr Command kCommands[] = {
    {"list", "every implementation that a config can select", list},
    {"info", "one implementation and its options: KIND ID", info},
    {"check", "run every contract of a plugin's kind: FILE, or KIND/ID", check},
};

}  // namespace

int plugins_command(const Arguments& arguments) { return dispatch("quern plugins", kCommands, arguments); }

}  // namespace quern::cli
