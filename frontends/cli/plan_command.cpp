// `quern plan FILE`: what a run will take, without touching a device or the data.
#include <iostream>

#include <boost/program_options/value_semantic.hpp>

#include "commands.h"
#include "plan/report.h"
#include "quern/error.h"
#include "train/run_schemas.h"
#include "train/session.h"

namespace quern::cli {

int plan_command(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("show", po::value<std::string>(), "program: print the programs")(
      "pass", po::value<std::string>()->default_value("fuse"),
      "with --show program, after this pass: model, rotate, differentiate, lower, saved, fuse or place");
  std::optional<RunArguments> run =
      parse_run("quern plan FILE [--set a.b=v]... [--show program [--pass NAME]]", options, arguments);
  if (!run) return 0;
  PluginHost host = run_host();
  ResolvedConfig config = resolve(run->document, run_schemas(), host);
  Session session(config, host);
  if (run->values.count("show")) {
    std::string what = run->values["show"].as<std::string>();
    if (what != "program")
      throw Error(ErrorCode::config,
                  {.where = "--show", .what = "nothing of that name", .found = what, .expected = "program"});
    std::cout << show_programs(session.parts(), session.plan_options(), run->values["pass"].as<std::string>());
    return 0;
  }
  std::cout << plan_report(make_plan(session.parts(), session.plan_options()), session.device->traits(),
                           session.train.accumulation);
  return 0;
}

}  // namespace quern::cli
