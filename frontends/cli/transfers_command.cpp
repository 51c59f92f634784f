// `quern bench transfers FILE`: how much longer a training step is for the transfers between ranks.
#include <iostream>

#include <unistd.h>
#include <boost/program_options/value_semantic.hpp>

#include "bench/transfers.h"
#include "commands.h"
#include "launch/starter_link.h"
#include "quern/error.h"
#include "run/session.h"
#include "start_ranks.h"

namespace quern::cli {

using namespace bench;

int transfers_command(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("steps", po::value<std::int64_t>()->default_value(5),
                        "steps to time with transfers, and as many without")(
      "json", po::value<std::string>()->value_name("OUT"), "write the figures to this file too")(
      "commit", po::value<std::string>()->value_name("ID")->default_value(""),
      "the commit of the build, for that file");
  std::optional<RunArguments> run = parse_run(
      "quern bench transfers FILE [--steps N] [--json OUT [--commit ID]] [--set a.b=v]...", options, arguments);
  if (!run) return 0;
  const std::int64_t steps = run->values["steps"].as<std::int64_t>();
  if (steps < 1)
    throw Error(
        ErrorCode::config,
        {.where = "--steps", .what = "number of steps", .found = std::to_string(steps), .expected = "at least 1"});
  const std::string path = output_of(*run, "json", kTransfersFile);
  run->overrides.push_back("parallel.restarts=0");
  if (const std::optional<RankPlace> place = rank_place()) {
    take_place(*place, *run);
    hear_starter([](int signal) { ::_exit(128 + signal); });
  } else if (const std::optional<int> code = start_ranks(*run, {"bench", "transfers"}, arguments)) {
    return *code;
  }
  ConfiguredRun configured(ConfigDocument::read(run->file, run->overrides));
  Session& session = configured.session;
  need_several_ranks(session, "transfers are between ranks");
  Ranks ranks(session);
  const TransfersResult result = run_transfers_bench(session, ranks, steps);
  if (!ranks.leads()) return 0;
  std::cout << transfers_table(result, session.device->traits());
  if (!path.empty())
    write_output(path, transfers_json(result, session.device->traits(), run->values["commit"].as<std::string>()));
  return 0;
}

}  // namespace quern::cli
