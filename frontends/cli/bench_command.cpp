// `quern bench FILE`: how fast a run's training steps are here, and where the time goes.
#include <fstream>
#include <iostream>

#include <boost/program_options/value_semantic.hpp>

#include "commands.h"
#include "quern/error.h"
#include "train/bench.h"
#include "train/run_schemas.h"

namespace quern::cli {

int bench_command(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("steps", po::value<std::int64_t>()->default_value(5),
                        "optimizer steps to time, after one to warm up")(
      "measure-peaks", "measure the device's memory and matmul rates first, and report shares of them too")(
      "json", po::value<std::string>()->value_name("OUT"), "write the figures to this file too")(
      "commit", po::value<std::string>()->value_name("ID")->default_value(""), "what was built, for that file");
  std::optional<RunArguments> run = parse_run(
      "quern bench FILE [--steps N] [--measure-peaks] [--json OUT [--commit ID]] [--set a.b=v]...", options, arguments);
  if (!run) return 0;
  std::int64_t steps = run->values["steps"].as<std::int64_t>();
  if (steps < 1)
    throw Error(
        ErrorCode::config,
        {.where = "--steps", .what = "number of steps", .found = std::to_string(steps), .expected = "at least 1"});
  PluginHost host = run_host();
  ResolvedConfig config = resolve(run->document, run_schemas(), host);
  Session session(config, host);
  BenchResult result = run_bench(session, {steps, run->values.count("measure-peaks") > 0});
  std::cout << bench_table(result, session.device->traits());
  if (!run->values.count("json")) return 0;
  std::string path = run->values["json"].as<std::string>();
  std::ofstream file(path);
  BenchOrigin origin{{"quern", "bench"}, run->values["commit"].as<std::string>()};
  origin.command.insert(origin.command.end(), arguments.begin(), arguments.end());
  file << bench_json(result, session, origin);
  if (!file.flush())
    throw Error(ErrorCode::resources,
                {.where = path, .what = "cannot be written", .next = "choose another --json file"});
  return 0;
}

}  // namespace quern::cli
