#include "ab/experiment.h"

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using namespace quern::ab;

TEST_CASE("nobody else compares in the directory until the report is written") {
  TestDirectory directory;
  Experiment experiment{.program = "/bin/true", .config = "run.toml", .directory = directory / "ab"};
  experiment.arms = {{.name = "a", .folder = "1-a", .overrides = {}}};
  experiment.resolved = {"text"};
  experiment.seeds = {1};
  const auto silent = [](const Arm&, const Run&, int, int) {};
  {
    const ExperimentResult result = run_experiment(experiment, silent);
    CHECK(result.arms.at(0).runs.size() == 1);
    testkit::check_refused(ErrorCode::resources, {"another run writes into this directory", "--out"},
                           [&] { run_experiment(experiment, silent); });
  }
  CHECK(run_experiment(experiment, silent).arms.at(0).runs.size() == 1);
}
