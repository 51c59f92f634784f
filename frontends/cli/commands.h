#pragma once
// The commands of `quern`, one file each. A command gets the words after its name, prints its result to standard
// output and throws quern::Error for everything else; main() prints that and picks the exit code.

#include <span>
#include <string>
#include <vector>

#include <boost/program_options/options_description.hpp>
#include <boost/program_options/positional_options.hpp>
#include <boost/program_options/variables_map.hpp>

namespace quern::cli {

using Arguments = std::vector<std::string>;

struct Command {
  const char* name;
  const char* help;
  void (*run)(const Arguments&);
};

void config_command(const Arguments& arguments);
void plugins_command(const Arguments& arguments);

/// Runs the one of `commands` that `arguments` begins with; `owner` is "quern" or "quern config". Help for --help,
/// -h or no words at all; a config error with the nearest name for an unknown command.
void dispatch(const std::string& owner, std::span<const Command> commands, const Arguments& arguments);

/// Parses a command's words. `usage` is its first help line; positional words go to the options that `positional`
/// names, all of which are required. Prints help and returns false for --help; throws a config error for bad words.
bool parse(const std::string& usage, boost::program_options::options_description options,
           const std::vector<std::string>& positional, const Arguments& arguments,
           boost::program_options::variables_map& values);

}  // namespace quern::cli
