// `quern bench FILE`: how fast a run's training steps are here, and where the time goes.
#include <iostream>

#include <boost/program_options/value_semantic.hpp>

#include "bench/bench.h"
#include "commands.h"
#include "plan/show_schedules.h"
#include "quern/error.h"
#include "run/session.h"

namespace quern::cli {

using namespace bench;

int bench_command(const Arguments& arguments) {
  if (!arguments.empty() && arguments[0] == "comm") return comm_command({arguments.begin() + 1, arguments.end()});
  if (!arguments.empty() && arguments[0] == "transfers")
    return transfers_command({arguments.begin() + 1, arguments.end()});
  if (!arguments.empty() && arguments[0] == "products")
    return products_command({arguments.begin() + 1, arguments.end()});
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("steps", po::value<std::int64_t>()->default_value(5),
                        "optimizer steps to time, after one to warm up")(
      "measure-peaks", "measure the device's memory and matmul rates first, and report shares of them too")(
      "json", po::value<std::string>()->value_name("OUT"), "write the figures to this file too")(
      "timeline", po::value<std::string>()->value_name("OUT"),
      "write the measured times of a step, launched action by action, to this file (for Perfetto)")(
      "commit", po::value<std::string>()->value_name("ID")->default_value(""),
      "the commit of the build, for that file");
  std::optional<RunArguments> run = parse_run(
      "quern bench FILE [--steps N] [--measure-peaks] [--json OUT [--commit ID]] [--timeline OUT] [--set a.b=v]...\n"
      "       quern bench comm --help\n"
      "       quern bench products --help\n"
      "       quern bench transfers --help",
      options, arguments);
  if (!run) return 0;
  std::int64_t steps = run->values["steps"].as<std::int64_t>();
  if (steps < 1)
    throw Error(
        ErrorCode::config,
        {.where = "--steps", .what = "number of steps", .found = std::to_string(steps), .expected = "at least 1"});
  const std::string path = output_of(*run, "json", kBenchFile);
  const std::string timeline = output_of(*run, "timeline", kTimelineFile);
  ConfiguredRun configured(ConfigDocument::read(run->file, run->overrides));
  Session& session = configured.session;
  if (session.parallel.ranks > 1)
    throw Error(
        ErrorCode::config,
        {.where = session.config.where("parallel", "ranks"),
         .what = "a bench has one rank",
         .found = std::to_string(session.parallel.ranks),
         .expected = "1",
         .next = "time a run of several with quern train or quern bench transfers, their collectives with quern bench "
                 "comm"});
  BenchResult result = run_bench(session, {steps, run->values.count("measure-peaks") > 0});
  for (const std::string& warning : session.device->traits().warnings) std::cerr << "quern: " << warning << "\n";
  std::cout << bench_table(result, session.device->traits());
  if (!path.empty()) {
    BenchOrigin origin{{"quern", "bench"}, run->values["commit"].as<std::string>()};
    origin.command.insert(origin.command.end(), arguments.begin(), arguments.end());
    write_output(path, bench_json(result, session, origin));
  }
  if (!timeline.empty())
    write_output(timeline, timeline_json(result.timeline, "quern, measured on " + session.device->traits().name));
  return 0;
}

}  // namespace quern::cli
