#pragma once
// The commands of `quern`, one file each. A command gets the words after its name, prints its result to standard
// output, returns the exit code, and throws quern::Error for what goes wrong; main() prints that and takes its code.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <boost/program_options/options_description.hpp>
#include <boost/program_options/positional_options.hpp>
#include <boost/program_options/variables_map.hpp>

#include "base/files/descriptor.h"

namespace quern::cli {

using Arguments = std::vector<std::string>;

struct Command {
  const char* name;
  const char* help;
  int (*run)(const Arguments&);
};

int train_command(const Arguments& arguments);
int generate_command(const Arguments& arguments);
int eval_command(const Arguments& arguments);
int bench_command(const Arguments& arguments);
/// Of `quern bench`: what follows "comm".
int comm_command(const Arguments& arguments);
/// Of `quern bench`: the arguments after `products`.
int products_command(const Arguments& arguments);
/// Of `quern bench`: what follows "transfers".
int transfers_command(const Arguments& arguments);
int plan_command(const Arguments& arguments);
int ab_command(const Arguments& arguments);
int data_command(const Arguments& arguments);
int checkpoint_command(const Arguments& arguments);
int export_command(const Arguments& arguments);
int config_command(const Arguments& arguments);
int plugins_command(const Arguments& arguments);

/// Runs the one of `commands` that `arguments` begins with; `owner` is "quern" or "quern config". Help for --help,
/// -h or no words at all; a config error with the nearest name for an unknown command.
int dispatch(const std::string& owner, std::span<const Command> commands, const Arguments& arguments);

/// Parses a command's words. `usage` is its first help line; positional words go to the options that `positional`
/// names, all of which are required. Prints help and returns false for --help; throws a config error for bad words and
/// for empty ones, which no option takes.
bool parse(const std::string& usage, boost::program_options::options_description options,
           const std::vector<std::string>& positional, Arguments arguments,
           boost::program_options::variables_map& values);

/// The words of a text between `mark`s.
std::vector<std::string> listed(const std::string& text, char mark = ',');

/// Columns of the terminal that standard output goes to; 0: it is none.
std::size_t terminal_columns();

/// A command on a run's config: FILE, the --set words to lay over it, and options of the command's own.
struct RunArguments {
  std::string file;
  std::vector<std::string> overrides;
  boost::program_options::variables_map values;
};
/// Empty after --help.
std::optional<RunArguments> parse_run(const std::string& usage, boost::program_options::options_description options,
                                      const Arguments& arguments);

/// The file that `option` names; "" without it. A resources error for a file of another kind, and where none can be
/// made; a character device or a pipe is fine.
std::string output_of(const RunArguments& run, const std::string& option, const FileKind& kind);
/// Writes it whole or not at all; to a device or a pipe, as they take it.
void write_output(const std::string& path, const std::string& text);

}  // namespace quern::cli
