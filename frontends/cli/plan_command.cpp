// `quern plan FILE`: what a run will take, without touching a device or the data.
#include <iostream>

#include <boost/program_options/value_semantic.hpp>

#include "commands.h"
#include "plan/show_schedules.h"
#include "quern/error.h"
#include "quern/run.h"

namespace quern::cli {

int plan_command(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("show", po::value<std::string>(), "program or schedule: print that")(
      "pass", po::value<std::string>()->default_value("fuse"),
      "with --show program, after this pass: model, rotate, differentiate, lower, saved, fuse or place");
  options.add_options()("run", po::value<std::string>()->default_value(""),
                        "with --show schedule, only the run of this name, such as \"later micro-step\"")(
      "timeline", po::value<std::string>(), "write the estimated timeline of a step to this file (for Perfetto)")(
      "verify", "check the laws of the schedule: what is read was written, nothing overlaps, no race");
  std::optional<RunArguments> run = parse_run(
      "quern plan FILE [--set a.b=v]... [--show program [--pass NAME] | --show schedule [--run NAME]] "
      "[--timeline FILE.json] [--verify]",
      options, arguments);
  if (!run) return 0;
  const std::string timeline = output_of(*run, "timeline", kTimelineFile);
  TrainingRun planned(run->file, run->overrides);
  if (run->values.count("show")) {
    std::string what = run->values["show"].as<std::string>();
    if (what != "program" && what != "schedule")
      throw Error(
          ErrorCode::config,
          {.where = "--show", .what = "nothing of that name", .found = what, .expected = "program or schedule"});
    if (what == "program") {
      std::cout << planned.show_program(run->values["pass"].as<std::string>());
      return 0;
    }
  }
  if (run->values.count("show"))
    std::cout << planned.show_schedule(run->values["run"].as<std::string>());
  else
    std::cout << planned.plan_report();
  if (run->values.count("verify"))
    std::cout << "verified        " << planned.verify_plan()
              << " actions: every read was written, no overlap, no race\n";
  if (!timeline.empty()) write_output(timeline, planned.timeline());
  return 0;
}

}  // namespace quern::cli
