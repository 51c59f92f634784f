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
      "document-tokens", po::value<std::int64_t>(),
      "cut rows into documents of two thirds to four thirds of so many tokens, for a run with data.documents = "
      "\"masked\"; otherwise each row is one")(
      "measure-peaks", "measure the device's memory and matmul rates first, and report shares of them too")(
      "json", po::value<std::string>()->value_name("OUT"), "write the figures to this file too")(
      "timeline", po::value<std::string>()->value_name("OUT"),
      "write the measured times of a step, launched action by action, to this file (for Perfetto)")(
      "commit", po::value<std::string>()->value_name("ID")->default_value(""),
      "the commit of the build, for that file");
  std::optional<RunArguments> run = parse_run(
      "quern bench FILE [--steps N] [--document-tokens N] [--measure-peaks] [--json OUT [--commit ID]]\n"
      "                        [--timeline OUT] [--set a.b=v]...\n"
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
  std::int64_t document_tokens = 0;
  if (run->values.count("document-tokens") > 0) {
    document_tokens = run->values["document-tokens"].as<std::int64_t>();
    if (document_tokens < 1 || !session.plan_options().documents)
      throw Error(ErrorCode::config, {.where = "--document-tokens",
                                      .what = "the mean length of documents in a run that masks them",
                                      .found = std::to_string(document_tokens),
                                      .expected = "at least 1, with --set data.documents=masked"});
  }
  BenchResult result = run_bench(session, {steps, run->values.count("measure-peaks") > 0, document_tokens});
  for (const std::string& warning : session.device->traits().warnings) std::cerr << "quern: " << warning << "\n";
  std::cout << bench_table(result, session.device->traits());
  if (document_tokens > 0) std::cout << "SOL, MFU and estimates are as if each row were one document\n";
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
