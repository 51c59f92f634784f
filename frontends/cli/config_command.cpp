// quern config: show, check and describe configurations, without running anything.
#include <iostream>

#include "commands.h"
#include "config/reference.h"
#include "quern/run.h"
#include "run/options/run_schemas.h"

namespace quern::cli {

namespace po = boost::program_options;

namespace {

// The resolved config of FILE and its --set words, as TOML; empty after --help.
std::optional<std::string> resolve_arguments(const std::string& usage, const Arguments& arguments) {
  std::optional<RunArguments> run = parse_run(usage, po::options_description("options"), arguments);
  if (!run) return std::nullopt;
  return resolved_config({.file = run->file, .overrides = run->overrides});
}

int show(const Arguments& arguments) {
  if (auto config = resolve_arguments("quern config show FILE [--set a.b=v]...", arguments)) std::cout << *config;
  return 0;
}

int check(const Arguments& arguments) {
  if (resolve_arguments("quern config check FILE [--set a.b=v]...", arguments)) std::cout << "the config is valid\n";
  return 0;
}

int reference(const Arguments& arguments) {
  po::variables_map values;
  if (!parse("quern config reference", po::options_description("options"), {}, arguments, values)) return 0;
  PluginHost host = run_host();
  std::cout << reference_markdown(run_schemas(), host, terminal_columns());
  return 0;
}

constexpr Command kCommands[] = {
    {"show", "print a config with every default filled in", show},
    {"check", "report all faults of a config", check},
    {"reference", "print the page of all options, as Markdown", reference},
};

}  // namespace

int config_command(const Arguments& arguments) { return dispatch("quern config", kCommands, arguments); }

}  // namespace quern::cli
