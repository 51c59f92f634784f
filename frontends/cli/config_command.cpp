// quern config: show, check and describe configurations, without running anything.
#include <iostream>

#include <boost/program_options/value_semantic.hpp>

#include "commands.h"
#include "config/reference.h"
#include "config/resolve.h"
#include "config/run_schemas.h"

namespace quern::cli {

namespace po = boost::program_options;

namespace {

// The resolved config of FILE and its --set words; false after --help.
bool resolve_arguments(const std::string& usage, const Arguments& arguments, ResolvedConfig& config) {
  po::options_description options("options");
  options.add_options()("set", po::value<std::vector<std::string>>()->composing()->value_name("a.b=v"),
                        "override a key; may be repeated");
  po::variables_map values;
  if (!parse(usage, options, {"FILE"}, arguments, values)) return false;
  ConfigDocument document = ConfigDocument::read(values["FILE"].as<std::string>());
  if (values.count("set"))
    for (const std::string& assignment : values["set"].as<std::vector<std::string>>()) document.set(assignment);
  PluginHost host = run_host();
  config = resolve(document, run_schemas(), host);
  return true;
}

void show(const Arguments& arguments) {
  ResolvedConfig config;
  if (resolve_arguments("quern config show FILE [--set a.b=v]...", arguments, config)) std::cout << config.to_toml();
}

void check(const Arguments& arguments) {
  ResolvedConfig config;
  if (resolve_arguments("quern config check FILE [--set a.b=v]...", arguments, config))
    std::cout << "the config is valid\n";
}

void reference(const Arguments& arguments) {
  po::variables_map values;
  if (!parse("quern config reference", po::options_description("options"), {}, arguments, values)) return;
  PluginHost host = run_host();
  std::cout << reference_markdown(run_schemas(), host);
}

constexpr Command kCommands[] = {
    {"show", "print a config with every default filled in", show},
    {"check", "report all that is wrong with a config", check},
    {"reference", "print the page of all options, as Markdown", reference},
};

}  // namespace

void config_command(const Arguments& arguments) { dispatch("quern config", kCommands, arguments); }

}  // namespace quern::cli
