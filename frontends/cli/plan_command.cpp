// `quern plan FILE`: what a run will take, without touching a device or the data.
#include <filesystem>
#include <iostream>
#include <system_error>

#include <boost/program_options/value_semantic.hpp>

#include "commands.h"
#include "plan/report.h"
#include "plan/show_schedules.h"
#include "quern/error.h"
#include "quern/options.h"
#include "quern/run.h"
#include "run/assumed_gpu.h"

namespace quern::cli {

namespace {

[[noreturn]] void refuse(const std::string& where, const std::string& what, std::string found, std::string expected,
                         std::string next = {}) {
  throw Error(ErrorCode::config, {.where = where,
                                  .what = what,
                                  .found = std::move(found),
                                  .expected = std::move(expected),
                                  .next = std::move(next)});
}

/// Planned for other GPUs, a config is read several times, and a pipe only once.
void check_file(const RunArguments& run) {
  std::error_code absent;
  if (!std::filesystem::is_fifo(run.file, absent)) return;
  for (const char* option : {"gpu", "gpus"})
    if (run.values.count(option))
      refuse(run.file, std::string("read several times for --") + option, "a pipe", "a file");
}

/// The run's overrides for a GPU, or for the device that it has.
std::vector<std::string> assumptions(const RunArguments& run) {
  const std::string host_memory = run.values["host-memory"].as<std::string>();
  if (!run.values.count("gpu")) return assuming(run.file, run.overrides, {}, host_memory);
  const auto& names = run.values["gpu"].as<std::vector<std::string>>();
  const std::string& name = names[0];
  if (names.size() > 1)
    refuse("--gpu", "plans for one GPU", std::to_string(names.size()) + " names", "its name",
           "--gpus makes a table of several, with commas between");
  if (name == "all") refuse("--gpu", "plans for one GPU", "\"all\"", "its name", "--gpus all makes a table of all");
  return assuming(run.file, run.overrides, gpus_named("--gpu", name, assumable_gpus(run.file, run.overrides)),
                  host_memory);
}

/// Prints what fits on each GPU of the list `names`.
void print_table_of(const RunArguments& run, const std::string& names) {
  for (const char* other : {"gpu", "show", "timeline", "verify", "write"})
    if (run.values.count(other))
      refuse("--gpus", "makes a table of GPUs and nothing else", std::string("also --") + other, {},
             other == std::string("gpu") ? "--gpus takes several names, with commas between"
                                         : std::string("give --") + other + " with --gpu, or without a GPU");
  const OptionSpec known = assumable_gpus(run.file, run.overrides);
  std::vector<AssumedGpus> gpus;
  if (names == "all")
    for (const std::string& id : known.choices) gpus.push_back({.id = id});
  else
    for (const std::string& name : listed(names)) gpus.push_back(gpus_named("--gpus", name, known));
  if (gpus.empty()) refuse("--gpus", "names no GPU", "\"\"", "all, or names with commas between");
  std::vector<std::vector<std::string>> overrides;
  for (const AssumedGpus& gpu : gpus)
    overrides.push_back(assuming(run.file, run.overrides, gpu, run.values["host-memory"].as<std::string>()));
  write_fit_table(std::cout, run.file, overrides);
}

/// The output: the report, or what --show names.
std::string text_of(TrainingRun& planned, const RunArguments& run) {
  if (!run.values.count("show")) return planned.plan_report();
  const std::string what = run.values["show"].as<std::string>();
  if (what == "program") return planned.show_program(run.values["pass"].as<std::string>());
  if (what == "schedule") return planned.show_schedule(run.values["run"].as<std::string>());
  refuse("--show", "nothing of that name", what, "program or schedule");
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
      "verify", "check the schedule: values are written before they are read, nothing overlaps, no race");
  options.add_options()(
      "gpu", po::value<std::vector<std::string>>()->composing(),
      "plan for this GPU (\"RTX 4090\"), or so many (\"4x RTX 4090\"), within its memory unless the config has a "
      "budget")("gpus", po::value<std::string>(), "all, or names separated by commas: a table of plans")(
      "host-memory", po::value<std::string>()->default_value(""), "plan within so much host memory, such as 64GiB")(
      "write", po::value<std::string>(),
      "choose the micro-batch too, and what ranks shard unless the config says it, and write the config with all "
      "choices "
      "to this file");
  std::optional<RunArguments> run = parse_run(
      "quern plan FILE [--set a.b=v]... [--gpu NAME | --gpus all] [--host-memory SIZE] [--write FILE.toml] "
      "[--show program [--pass NAME] | --show schedule [--run NAME]] [--timeline FILE.json] [--verify]",
      options, arguments);
  if (!run) return 0;
  if (const std::string size = run->values["host-memory"].as<std::string>(); !size_in_bytes(size))
    refuse("--host-memory", "not a size", to_string(OptionValue(size)), "a size up to 4194304 TiB, such as 64GiB");
  const std::string timeline = output_of(*run, "timeline", kTimelineFile);
  const std::string chosen = output_of(*run, "write", kChosenConfigFile);
  check_file(*run);
  if (run->values.count("gpus")) {
    print_table_of(*run, run->values["gpus"].as<std::string>());
    return 0;
  }
  TrainingRun planned(run->file, assumptions(*run));
  if (!chosen.empty()) planned.choose_micro_batch();
  std::cout << text_of(planned, *run);
  if (run->values.count("verify"))
    std::cout << "verified        " << planned.verify_plan()
              << " actions: every read was written, no overlap, no race\n";
  if (!timeline.empty()) write_output(timeline, planned.timeline());
  if (!chosen.empty()) write_output(chosen, planned.chosen_config());
  return 0;
}

}  // namespace quern::cli
