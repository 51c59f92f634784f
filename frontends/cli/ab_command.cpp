// `quern ab FILE --vary KEY=V1,V2`: trains a config's variants in turn and says how they differ, in speed, memory and
// numbers, beside what another seed changes.
#include <csignal>
#include <filesystem>
#include <iostream>
#include <limits>

#include <unistd.h>

#include <boost/program_options/value_semantic.hpp>

#include "ab/experiment.h"
#include "base/files/durable_file.h"
#include "base/format.h"
#include "commands.h"
#include "config/resolve.h"
#include "log/background_output.h"
#include "quern/error.h"
#include "run/options/run_options.h"
#include "run/options/run_schemas.h"

namespace quern::cli {

using namespace ab;

namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

constexpr const char* kUsage =
    "quern ab FILE --vary a.b=V1,V2... [--repeat N] [--steps N] [--out DIR] [--set a.b=v]...\n\n"
    "Trains FILE once for each value and repeat, alternating (A B A B), each run in its own process. The runs of a "
    "repeat share\none seed. Several --vary make all combinations. The other arms are compared with the first. A run "
    "that fails is\nreported, the others continue, and the exit code is the first failed run's. The same command "
    "continues an\ninterrupted comparison, and a larger --repeat adds runs.";

/// Held while the reader stalls: all that a comparison prints.
constexpr std::size_t kUnreadBytes = std::size_t{16} << 20;

Words list_of(const boost::program_options::variables_map& values, const char* name) {
  return values.count(name) ? values[name].as<Words>() : Words{};
}

std::string quern_program() {
  std::error_code error;
  fs::path path = fs::read_symlink("/proc/self/exe", error);
  if (error) throw Error(ErrorCode::resources, {.where = "/proc/self/exe", .what = error.message()});
  return path.string();
}

// Every arm's config is resolved before anything runs: a misspelt key is no reason to train the first arm.
void resolve_arms(Experiment& experiment) {
  PluginHost host = run_host();
  for (const Arm& arm : experiment.arms) {
    ConfigDocument document = ConfigDocument::read(experiment.config);
    for (const Words& overrides : {experiment.overrides, arm.overrides})
      for (const std::string& override : overrides) document.set(override);
    ResolvedConfig config = resolve(document, run_schemas(), host);
    experiment.resolved.push_back(config.to_toml());
    const std::int64_t seed = train_options().bind(config.section("train")).seed;
    constexpr std::int64_t kLast = std::numeric_limits<std::int64_t>::max();
    if (seed > kLast - (experiment.repeats - 1))
      throw Error(ErrorCode::config, {.where = config.where("train", "seed"),
                                      .what = "too large for " + std::to_string(experiment.repeats) + " repeats",
                                      .found = std::to_string(seed),
                                      .expected = "at most " + std::to_string(kLast - (experiment.repeats - 1)),
                                      .next = "each repeat takes the next seed"});
    experiment.seeds.push_back(seed);
  }
}

std::string ending(const Run& run) {
  if (run.code != 0) return run.message.empty() ? "code " + std::to_string(run.code) : run.message;
  if (run.log.steps.empty()) return format_duration(run.seconds);
  std::string text = "loss " + format_fixed(run.log.steps.back().loss, 4);
  if (run.log.validation_loss) text += "  val loss " + format_fixed(*run.log.validation_loss, 4);
  return text + "  " + format_count(median_speed(run)) + " tok/s  " + format_duration(run.seconds);
}

void tell(const Arm& arm, const Run& run, int number, int count) {
  const bool terminal = ::isatty(STDOUT_FILENO) != 0;
  std::string line = std::to_string(number) + "/" + std::to_string(count) + "  " + arm.name + "  seed " +
                     std::to_string(run.seed) + "  ";
  if (run.code != -1)
    std::cout << (terminal ? "\r\x1b[K" : "") << line << ending(run) << std::endl;
  else if (terminal)
    std::cout << line << "running" << std::flush;
}

void write_report(const std::string& path, const std::string& text) {
  DurableFile file(path);
  file.write(text);
  file.commit();
}

int worst_code(const std::vector<ArmRuns>& arms) {
  for (const ArmRuns& arm : arms)
    for (const Run& run : arm.runs)
      if (!run.good()) return run.code;
  return 0;
}

}  // namespace

int ab_command(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("vary", po::value<Words>()->composing()->value_name("a.b=V1,V2"),
                        "a key and its values, as TOML; may be repeated")(
      "arm", po::value<Words>()->composing()->value_name("a.b=v,c.d=w"), "one more arm, by hand; may be repeated")(
      "repeat", po::value<int>()->default_value(1)->value_name("N"), "runs of each arm, with seeds that count up")(
      "steps", po::value<std::int64_t>()->value_name("N"), "train.steps of all arms")(
      "out", po::value<std::string>()->value_name("DIR"), "where runs and report go; else runs/ab-FILE")(
      "set", po::value<Words>()->composing()->value_name("a.b=v"), "override a key in all arms; may be repeated");
  po::variables_map values;
  if (!parse(kUsage, options, {"FILE"}, arguments, values)) return 0;

  Experiment experiment;
  experiment.program = quern_program();
  experiment.config = values["FILE"].as<std::string>();
  // An arm's end state is not kept: only its log is read.
  experiment.overrides = {"checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.export=false"};
  for (const std::string& word : list_of(values, "set")) experiment.overrides.push_back(word);
  if (values.count("steps"))
    experiment.overrides.push_back("train.steps=" + std::to_string(values["steps"].as<std::int64_t>()));
  experiment.arms = make_arms(list_of(values, "vary"), list_of(values, "arm"));
  experiment.repeats = values["repeat"].as<int>();
  if (experiment.repeats < 1)
    throw Error(ErrorCode::config, {.where = "--repeat",
                                    .what = "number of runs",
                                    .found = std::to_string(experiment.repeats),
                                    .expected = "at least 1"});
  experiment.directory =
      values.count("out") ? values["out"].as<std::string>() : "runs/ab-" + fs::path(experiment.config).stem().string();
  resolve_arms(experiment);
  std::signal(SIGUSR1, [](int) {});  // sent to all of a job: its runs may save, and there is nothing here to save

  BackgroundOutput output(std::cout, STDOUT_FILENO, kUnreadBytes);
  ExperimentResult result = run_experiment(experiment, tell);
  if (result.interrupted) {
    std::cout << "\nstopped; the same command continues with the remaining runs" << std::endl;
    return 128 + result.interrupted;
  }
  if (result.kept > 0) std::cout << result.kept << " runs were there already\n";
  ComparisonHead head{experiment.config, QUERN_VERSION, experiment.repeats};
  std::string report = comparison_markdown(head, result.arms);
  write_report(experiment.directory + "/report.md", report);
  write_report(experiment.directory + "/report.json", comparison_json(head, result.arms));
  std::cout << "\n"
            << report << "\nreport: " << experiment.directory << "/report.md, report.json\n"
            << "plots:  quern-tools plot ab " << experiment.directory << "\n";
  return worst_code(result.arms);
}

}  // namespace quern::cli
