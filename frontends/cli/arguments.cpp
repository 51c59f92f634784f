// Words of the command line: which command, and its options. Help goes to standard output and is no error.
#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <system_error>

#include <boost/program_options/errors.hpp>
#include <boost/program_options/parsers.hpp>
#include <boost/program_options/value_semantic.hpp>

#include "base/files/descriptor.h"
#include "base/files/durable_file.h"
#include "base/files/home.h"
#include "base/format.h"
#include "base/shorten.h"
#include "commands.h"
#include "quern/error.h"
#include "quern/options.h"

namespace quern::cli {

namespace po = boost::program_options;

namespace {

[[noreturn]] void refuse(const std::string& where, const std::string& what, std::string found, std::string expected,
                         std::string next) {
  throw Error(ErrorCode::config, {.where = where,
                                  .what = what,
                                  .found = std::move(found),
                                  .expected = std::move(expected),
                                  .next = std::move(next)});
}

/// A character device or a pipe, links followed: nothing there is replaced. `write_file` of quern-tools has this rule.
bool takes_bytes_as_they_come(const std::string& path) {
  std::error_code absent;
  const std::filesystem::file_status status = std::filesystem::status(path, absent);
  return std::filesystem::is_character_file(status) || std::filesystem::is_fifo(status);
}

}  // namespace

int dispatch(const std::string& owner, std::span<const Command> commands, const Arguments& arguments) {
  if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h") {
    std::cout << "usage: " << owner << " COMMAND ...\n\ncommands:\n";
    for (const Command& command : commands) {
      std::string name = command.name;
      name.resize(std::max<std::size_t>(name.size() + 2, 12), ' ');
      std::cout << "  " << name << command.help << "\n";
    }
    std::cout << "\n`" << owner << " COMMAND --help` describes one.\n";
    return 0;
  }
  std::vector<std::string> names;
  for (const Command& command : commands) {
    if (arguments[0] == command.name) return command.run({arguments.begin() + 1, arguments.end()});
    names.emplace_back(command.name);
  }
  const std::string near = nearest_name(arguments[0], names);
  refuse(owner, "unknown command", to_string(OptionValue(arguments[0])), "one of " + format_list(names),
         near.empty() ? near : "nearest name `" + near + "`");
}

bool parse(const std::string& usage, po::options_description options, const std::vector<std::string>& positional,
           Arguments arguments, po::variables_map& values) {
  for (std::string& word : arguments) {  // shells leave "--from=~/a" as it is
    const std::size_t begin = word.starts_with("--") ? word.find('=') + 1 : 0;
    word = word.substr(0, begin) + expand_home(word.substr(begin));
  }
  options.add_options()("help,h", "show this");
  po::options_description all;
  all.add(options);
  po::positional_options_description places;
  for (const std::string& name : positional) {
    all.add_options()(name.c_str(), po::value<std::string>());
    places.add(name.c_str(), 1);
  }
  const int style = po::command_line_style::default_style & ~po::command_line_style::allow_guessing;
  try {
    const po::parsed_options parsed =
        po::command_line_parser(arguments).options(all).positional(places).style(style).run();
    for (const po::option& option : parsed.options)
      if (std::find(option.value.begin(), option.value.end(), "") != option.value.end())  // "$UNSET" of a script
        refuse((option.position_key < 0 ? "--" : "") + option.string_key, "empty", "\"\"", "a value", "see --help");
    po::store(parsed, values);
  } catch (const po::error& e) {
    refuse(usage, bounded(e.what(), 300), {}, {}, "see --help");
  }
  if (values.count("help")) {
    std::cout << "usage: " << usage << "\n\n" << options;
    return false;
  }
  for (const std::string& name : positional)
    if (!values.count(name)) refuse(usage, "missing " + name, {}, {}, "see --help");
  return true;
}

std::vector<std::string> listed(const std::string& text, char mark) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, mark);) words.push_back(word);
  return words;
}

std::size_t terminal_columns() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

std::optional<RunArguments> parse_run(const std::string& usage, po::options_description options,
                                      const Arguments& arguments) {
  options.add_options()("set", po::value<std::vector<std::string>>()->composing()->value_name("a.b=v"),
                        "override a key; may be repeated");
  RunArguments run;
  if (!parse(usage, options, {"FILE"}, arguments, run.values)) return std::nullopt;
  run.file = run.values["FILE"].as<std::string>();
  if (run.values.count("set")) run.overrides = run.values["set"].as<std::vector<std::string>>();
  return run;
}

std::string output_of(const RunArguments& run, const std::string& option, const FileKind& kind) {
  if (!run.values.count(option)) return "";
  const std::string path = run.values[option].as<std::string>();
  if (takes_bytes_as_they_come(path)) {
    if (::access(path.c_str(), W_OK) != 0) fail_resources(path, "cannot be written", errno);
    return path;
  }
  check_own_file(path, kind, "choose another --" + option + " file");
  const DurableFile probe(path);  // before the work whose results go there
  return path;
}

void write_output(const std::string& path, const std::string& text) {
  if (takes_bytes_as_they_come(path)) {
    const OwnedDescriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY));
    if (!file || !write_all(file.get(), text)) fail_resources(path, "cannot be written", errno);
    return;
  }
  DurableFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace quern::cli
