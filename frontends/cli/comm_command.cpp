// `quern bench comm FILE`: how fast the ranks of a config move and sum bytes, by each communicator.
#include <iostream>

#include <unistd.h>
#include <boost/program_options/value_semantic.hpp>

#include "bench/comm.h"
#include "commands.h"
#include "launch/starter_link.h"
#include "quern/error.h"
#include "run/session.h"
#include "start_ranks.h"

namespace quern::cli {

using namespace bench;

namespace {

/// "64KiB" as it is; of a rate, "8GB/s", the part before "/s".
std::int64_t size_of_word(const std::string& where, const std::string& word, const std::string& expected) {
  const std::optional<std::int64_t> size = word.empty() ? std::nullopt : size_in_bytes(word);
  if (size && *size > 0) return *size;
  throw Error(ErrorCode::config, {.where = where, .what = "not a size", .found = word, .expected = expected});
}

CommBenchOptions options_of(const RunArguments& run) {
  CommBenchOptions options;
  options.print = [](const std::string& text) { std::cout << text << std::flush; };
  for (const std::string& word : listed(run.values["sizes"].as<std::string>()))
    options.sizes.push_back((size_of_word("--sizes", word, "sizes such as 4KiB,64MiB") + 15) / 16 * 16);
  if (options.sizes.empty())
    throw Error(ErrorCode::config, {.where = "--sizes", .what = "no sizes", .expected = "sizes such as 4KiB,64MiB"});
  if (std::string rate = run.values["throttle"].as<std::string>(); !rate.empty()) {
    if (rate.ends_with("/s")) rate.resize(rate.size() - 2);
    options.throttle = static_cast<double>(size_of_word("--throttle", rate, "a rate such as 8GB/s"));
    if (options.throttle < 1e6)  // a unit that was forgotten
      throw Error(ErrorCode::config, {.where = "--throttle",
                                      .what = "slower than any link",
                                      .found = rate + " bytes a second",
                                      .expected = "at least 1MB/s, such as 8GB/s"});
  }
  return options;
}

/// This process is a rank, of which each does this.
int measure(const RunArguments& run, const CommBenchOptions& options, const std::string& path) {
  ConfiguredRun configured(ConfigDocument::read(run.file, run.overrides));
  Session& session = configured.session;
  need_several_ranks(session, "collectives are between ranks");
  if (session.parallel.machines > 1)
    throw Error(ErrorCode::config, {.where = session.config.where("parallel", "machines"),
                                    .what = "collectives are timed in one group",
                                    .found = std::to_string(session.parallel.machines),
                                    .expected = "1",
                                    .next = "add --set parallel.machines=1"});
  Ranks ranks(session);
  const CommBenchResult result = run_comm_bench(session, ranks, options);
  if (!ranks.leads()) return 0;
  if (!path.empty())
    write_output(path, comm_bench_json(result, session.device->traits(), run.values["commit"].as<std::string>()));
  return 0;
}

}  // namespace

int comm_command(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("sizes", po::value<std::string>()->default_value("4KiB,256KiB,4MiB,64MiB"),
                        "bytes that each rank has of the whole")(
      "communicators", po::value<std::string>()->value_name("IDS")->default_value(""),
      "one after the other, such as nccl,memcpy; else the one of the config")(
      "throttle", po::value<std::string>()->value_name("RATE")->default_value(""),
      "slow the device's copies, as over a link of 8GB/s; NCCL is not slowed")(
      "json", po::value<std::string>()->value_name("OUT"), "write the figures of one communicator to this file too")(
      "commit", po::value<std::string>()->value_name("ID")->default_value(""),
      "the commit of the build, for that file");
  std::optional<RunArguments> run = parse_run(
      "quern bench comm FILE [--communicators IDS] [--sizes SIZES] [--throttle RATE] [--json OUT [--commit ID]] "
      "[--set a.b=v]...",
      options, arguments);
  if (!run) return 0;
  const CommBenchOptions wanted = options_of(*run);
  const std::string path = output_of(*run, "json", kCommBenchFile);
  run->overrides.push_back("train.accumulation=" + std::to_string(kMostRanks));  // no step is made: any number will do
  const std::vector<std::string> communicators = listed(run->values["communicators"].as<std::string>());
  if (const std::optional<RankPlace> place = rank_place()) {
    take_place(*place, *run);
    hear_starter([](int signal) { ::_exit(128 + signal); });
    return measure(*run, wanted, path);
  }
  if (communicators.size() > 1 && !path.empty())
    throw Error(ErrorCode::config, {.where = "--json",
                                    .what = "a file holds one communicator",
                                    .found = run->values["communicators"].as<std::string>(),
                                    .expected = "one of them"});
  auto with = [&](const std::vector<std::string>& settings) -> int {
    RunArguments one = *run;
    Arguments words = arguments;
    for (const std::string& setting : settings) {
      one.overrides.push_back(setting);
      words.insert(words.end(), {"--set", setting});
    }
    if (const std::optional<int> code = start_ranks(one, {"bench", "comm"}, words)) return *code;
    return measure(one, wanted, path);
  };
  if (communicators.empty()) return with({"parallel.restarts=0"});
  for (const std::string& id : communicators)
    if (const int code = with({"parallel.restarts=0", "parallel.communicator=" + id}); code != 0) return code;
  return 0;
}

}  // namespace quern::cli
