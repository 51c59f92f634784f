// The run API as a program uses it, beside whole runs of the same config.
#include "quern/run.h"

#include <algorithm>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using namespace quern::testing;
using testkit::check_refused;

TEST_CASE("steps taken one by one have the bits of a whole run, and a saved run goes on") {
  TinyFiles files;
  REQUIRE(quern_train(files, {files.run("whole")}).code == 0);
  RunRequests requests;
  const std::vector<std::string> config{files.run("stepped"), "checkpoint.every=0", "log.sinks=[\"jsonl\"]"};
  {
    TrainingRun run(files.config(), config);
    run.open_for_training(requests);
    run.start();
    for (int step = 0; step < 3; ++step) CHECK(run.step());
    CHECK(run.position().step == 3);
    CHECK(run.position().loss == logged_losses(files.at("whole")).at(3));
    CHECK(run.position().validation_loss == events(files.at("whole"), "eval").at(0).at("loss").get<double>());
    const std::vector<DataLoss> evaluated = run.evaluate();  // leaves no trace
    REQUIRE(evaluated.size() == 1);
    CHECK(evaluated[0].loss() == run.position().validation_loss);
    run.save();
    CHECK(newest_step(files.at("stepped")) == 3);
    CHECK(run.step());  // lost
  }
  TrainingRun run(files.config(), config);
  run.open_for_training(requests);
  while (run.step()) {
  }
  CHECK(run.train().finished);
  CHECK(newest_tensors(files.at("stepped")) == newest_tensors(files.at("whole")));
  Losses both = logged_losses(files.at("stepped"));
  CHECK(both == logged_losses(files.at("whole")));
}

TEST_CASE("tensors are read and written by name, and an export has the written values") {
  TinyFiles files;
  REQUIRE(quern_train(files, {}).code == 0);
  TrainingRun run(files.config());
  run.open_for_evaluation({});
  const double before = run.evaluate()[0].loss();
  const std::string name = "master/embedding.weight";
  const std::vector<float> values = run.read(name);
  CHECK(values.size() == 64 * 32);
  const std::vector<std::string> names = run.tensors();
  CHECK(std::find(names.begin(), names.end(), name) != names.end());
  std::vector<float> halved = values;
  for (float& value : halved) value /= 2;
  run.write(name, halved);
  CHECK(run.read(name) == halved);
  const double after = run.evaluate()[0].loss();
  CHECK(after != before);
  run.export_model(files.at("halved"));
  TrainingRun exported(files.config(), {"precision.id=fp32", "checkpoint.export_dtype=fp32"});
  exported.open_for_evaluation(weight_source(files.at("halved")));
  CHECK(exported.evaluate()[0].loss() == doctest::Approx(after).epsilon(1e-3));  // bf16 rounds exported values
  run.write(name, values);
  CHECK(run.evaluate()[0].loss() == before);
  check_refused(ErrorCode::config, {"no such tensor"}, [&] { run.read("master/none"); });
  check_refused(ErrorCode::config, {"expected 2048"}, [&] { run.write(name, {values.data(), 3}); });
}

TEST_CASE("a run is opened once, and for what it is then used") {
  TinyFiles files;
  TrainingRun run(files.config());
  check_refused(ErrorCode::config, {"not open for training"}, [&] { run.step(); });
  check_refused(ErrorCode::config, {"not open"}, [&] { run.evaluate(); });
  CHECK(has(run.plan_report(), "parameters"));
  CHECK(run.verify_plan() > 0);
  RunRequests requests;
  run.open_for_training(requests);
  run.start();
  check_refused(ErrorCode::config, {"open already"}, [&] { run.open_for_evaluation({}); });
  check_refused(ErrorCode::config, {"not open for texts"}, [&] { run.generate({{"a", {1}}}, {}); });
}
