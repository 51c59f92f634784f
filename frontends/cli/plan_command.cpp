// `quern plan FILE`: what a run will take, without touching a device or the data.
#include <iostream>
#include <sstream>

#include <boost/program_options/value_semantic.hpp>

#include "commands.h"
#include "plan/report.h"
#include "plan/show_schedules.h"
#include "quern/error.h"
#include "quern/run.h"
#include "run/assumed_gpu.h"

namespace quern::cli {

namespace {

/// The overrides of the run for each of the GPUs, of which `names` is a list; "": for the device that it has.
std::vector<std::vector<std::string>> assumptions(const RunArguments& run, const std::string& names) {
  const std::string host_memory = run.values["host-memory"].as<std::string>();
  if (names.empty()) return {assuming(run.file, run.overrides, "", host_memory)};
  const std::vector<std::string> known = assumable_gpus(run.file, run.overrides);
  std::vector<std::string> gpus;
  std::istringstream list(names);
  if (names == "all") gpus = known;
  for (std::string name; names != "all" && std::getline(list, name, ',');) gpus.push_back(gpu_named(name, known));
  std::vector<std::vector<std::string>> overrides;
  for (const std::string& gpu : gpus) overrides.push_back(assuming(run.file, run.overrides, gpu, host_memory));
  return overrides;
}

}  // namespace

int plan_command(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("show", po::value<std::string>(), "program or schedule: print that")(
      "pass", po::value<std::string>()->default_value("fuse"),
      "with --show program, after this pass: model, rotate, differentiate, lower, as_stored, saved, fuse or place");
  options.add_options()("run", po::value<std::string>()->default_value(""),
                        "with --show schedule, only the run of this name, such as \"later micro-step\"")(
      "timeline", po::value<std::string>(), "write the estimated timeline of a step to this file (for Perfetto)")(
      "verify", "check the laws of the schedule: what is read was written, nothing overlaps, no race");
  options.add_options()("gpu", po::value<std::string>(),
                        "plan for this GPU (\"RTX 4090\"), within its memory unless the config has a budget")(
      "gpus", po::value<std::string>(), "all, or names with commas between: a table of what fits where")(
      "host-memory", po::value<std::string>()->default_value(""), "plan within so much host memory, such as 64GiB")(
      "write", po::value<std::string>(),
      "choose the micro-batch too, and write the config with all that was chosen to this file");
  std::optional<RunArguments> run = parse_run(
      "quern plan FILE [--set a.b=v]... [--gpu NAME | --gpus all] [--host-memory SIZE] [--write FILE.toml] "
      "[--show program [--pass NAME] | --show schedule [--run NAME]] [--timeline FILE.json] [--verify]",
      options, arguments);
  if (!run) return 0;
  const std::string timeline = output_of(*run, "timeline", kTimelineFile);
  const std::string chosen = output_of(*run, "write", kChosenConfigFile);
  if (run->values.count("gpus")) {
    std::cout << fit_table(run->file, assumptions(*run, run->values["gpus"].as<std::string>()));
    return 0;
  }
  const std::string gpu = run->values.count("gpu") ? run->values["gpu"].as<std::string>() : "";
  TrainingRun planned(run->file, assumptions(*run, gpu).front());
  if (!chosen.empty()) planned.choose_micro_batch();
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
  if (!chosen.empty()) write_output(chosen, planned.chosen_config());
  return 0;
}

}  // namespace quern::cli
