// quern plugins: what can be selected, from where, and with which options.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <new>

#include <boost/program_options/value_semantic.hpp>

#include "base/files/test_directory.h"
#include "base/format.h"
#include "commands.h"
#include "config/reference.h"
#include "conformance/check.h"
#include "new_plugin.h"
#include "quern/error.h"
#include "run/options/run_schemas.h"

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

/// Unit 0 as the device opens it here, or why it cannot.
std::string here(const Factory& factory) {
  try {
    const std::unique_ptr<Device> device(static_cast<Device*>(factory.create(default_values(factory.options))));
    device->open(0);
    std::string text = device->traits().name + "\n";
    for (const std::string& warning : device->traits().warnings) text += "warning: " + warning + "\n";
    return text;
  } catch (const Error& error) {
    return std::string("cannot be opened: ") + error.what() + "\n";
  }
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
    const std::string near = nearest_name(kind, names);
    throw Error(ErrorCode::config, {.where = "quern plugins info",
                                    .what = "no such kind of plugin",
                                    .found = to_string(OptionValue(kind)),
                                    .expected = "one of " + format_list(names),
                                    .next = near.empty() ? near : "nearest name `" + near + "`"});
  }
  PluginHost host = run_host();
  const Factory& factory = host.require(kind, id, values["path"].as<std::string>());
  std::cout << kind << " " << id << ": " << factory.summary << "\n"
            << "from: " << host.origin(kind, id) << "\n";
  for (const auto& plugin : host.loaded()) std::cout << "licence: " << plugin->licence << "\n";
  if (kind == kPluginKind<Device>) std::cout << "here: " << here(factory);
  std::cout << "\n" << options_table(factory.options, terminal_columns());
  return 0;
}

/// Prints the table line by line, and bounds the time of each contract.
class Lines final : public conformance::Progress {
 public:
  explicit Lines(unsigned limit) : limit_(limit) {}
  void began(const std::string& subject, const std::string& contract) override {
    if (subject != subject_) std::cout << (subject_.empty() ? "" : "\n") << subject << "\n";
    subject_ = subject;
    std::cout << conformance::line_start(contract) << std::flush;
    ::alarm(limit_);
  }
  void ended(const conformance::Finding& finding) override {
    ::alarm(0);
    std::cout << conformance::line_end(finding) << std::flush;
  }

 private:
  unsigned limit_;  // seconds; 0: none
  std::string subject_;
};

/// Waits for the process that checks, which sets `ended` at its end. A plugin that ended it broke the contract whose
/// line was not finished.
int outcome(pid_t checking, const std::atomic<bool>& ended, unsigned limit) {
  int status = 0;
  while (::waitpid(checking, &status, 0) < 0)
    if (errno != EINTR)
      throw Error(ErrorCode::internal, {.where = "quern plugins check", .what = std::strerror(errno)});
  if (WIFEXITED(status) && ended) return WEXITSTATUS(status);
  const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  std::cout << "BROKEN   "
            << (signal == 0         ? "left the process with exit code " + std::to_string(WEXITSTATUS(status))
                : signal == SIGALRM ? "got no end within " + std::to_string(limit) + " s (--limit)"
                                    : "killed by signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")")
            << "; the remaining contracts were not run\n";
  return static_cast<int>(ErrorCode::internal);
}

int check(const Arguments& arguments) {
  po::variables_map values;
  po::options_description options("options");
  options.add_options()("set", po::value<std::vector<std::string>>()->composing()->value_name("key=value"),
                        "set an option of the plugin; may be repeated")(
      "device", po::value<std::string>()->default_value("cpu")->value_name("ID"),
      "device that communicators and stores work with")("ordinal", po::value<int>()->default_value(0)->value_name("N"),
                                                        "hardware unit of the device")(
      "limit", po::value<unsigned>()->default_value(600)->value_name("S"),
      "seconds that a contract may take; 0: any number")(
      "contract", po::value<std::vector<std::string>>()->composing()->value_name("NAME"),
      "check only contracts with NAME in their names, and those that they need; may be repeated")(
      "expect", po::value<std::string>()->default_value("")->value_name("FILE"),
      "also compare with the values that the author expects")("write", "write FILE, for the author to review");
  if (!parse("quern plugins check PLUGIN [--set key=value] (PLUGIN: a file, or KIND/ID)", options, {"PLUGIN"},
             arguments, values))
    return 0;
  conformance::CheckOptions how;
  if (values.count("set")) how.settings = values["set"].as<std::vector<std::string>>();
  if (values.count("contract")) how.only = values["contract"].as<std::vector<std::string>>();
  how.device = values["device"].as<std::string>();
  how.ordinal = values["ordinal"].as<int>();
  how.expected = values["expect"].as<std::string>();
  how.write_expected = values.count("write") > 0;
  if (how.write_expected && how.expected.empty())
    throw Error(ErrorCode::config, {.where = "quern plugins check --write",
                                    .what = "there is no file to write",
                                    .expected = "--expect FILE beside it"});
  const auto limit = values["limit"].as<unsigned>();
  // Another process, so that a plugin that crashes or hangs leaves a verdict.
  std::cout.flush();
  const TestDirectory scratch;  // holds the contracts' own, so that none outlives a crash
  void* shared = ::mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED)
    throw Error(ErrorCode::resources, {.where = "quern plugins check", .what = std::strerror(errno)});
  auto& ended = *new (shared) std::atomic<bool>(false);
  const pid_t checking = ::fork();
  if (checking < 0) throw Error(ErrorCode::resources, {.where = "quern plugins check", .what = std::strerror(errno)});
  if (checking > 0) return outcome(checking, ended, limit);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::setenv("TMPDIR", scratch.path().c_str(), 1);
  PluginHost host = run_host();
  Lines lines(limit);
  conformance::Report report;
  try {
    report = conformance::check(host, values["PLUGIN"].as<std::string>(), how, &lines);
  } catch (...) {  // of the requested plugin: main reports it
    ended = true;
    throw;
  }
  ended = true;
  std::cout << "\n" << report.counts();
  return report.exit_code();
}

int begin(const Arguments& arguments) {
  po::variables_map values;
  po::options_description options("options");
  options.add_options()("from", po::value<std::string>()->default_value("")->value_name("EXAMPLE"),
                        "the example that it begins as, instead of the first of its kind");
  if (!parse("quern plugins new KIND NAME [--from EXAMPLE]", options, {"KIND", "NAME"}, arguments, values)) return 0;
  const auto &kind = values["KIND"].as<std::string>(), &name = values["NAME"].as<std::string>(),
             &from = values["from"].as<std::string>();
  const std::filesystem::path prefix = PluginHost::core_library().parent_path().parent_path();
  const std::vector<Example> examples = examples_in(prefix / "share" / "quern" / "examples");
  const auto example = std::find_if(examples.begin(), examples.end(), [&](const Example& known) {
    return known.kind == kind && (from.empty() || known.id == from);
  });
  if (example == examples.end()) {
    std::vector<std::string> known;
    for (const Example& one : examples) known.push_back(one.kind + " " + one.id);
    throw Error(ErrorCode::config, {.where = "quern plugins new",
                                    .what = "there is no such example",
                                    .found = from.empty() ? kind : kind + " " + from,
                                    .expected = "one of " + format_list(known)});
  }
  copy_example(*example, name, ".");
  std::cout << name << ": as the example " << example->id << "; docs/plugins.md goes through it\n"
            << "cmake -S " << name << " -B build/" << name << " -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=\""
            << prefix.string() << "\" && cmake --build build/" << name << "\n"
            << "quern plugins check build/" << name << "/plugins/" << kind << "/libquern_" << name << ".so\n";
  return 0;
}

constexpr Command kCommands[] = {
    {"list", "every implementation that a config can select", list},
    {"info", "one implementation and its options: KIND ID", info},
    {"new", "a plugin to begin with, made of an example: KIND NAME", begin},
    {"check", "run every contract of a plugin's kind: FILE, or KIND/ID", check},
};

}  // namespace

int plugins_command(const Arguments& arguments) { return dispatch("quern plugins", kCommands, arguments); }

}  // namespace quern::cli
