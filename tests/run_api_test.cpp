// The run API as a program uses it, beside whole runs of the same config.
#include "quern/run.h"

#include <algorithm>
#include <cmath>

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
  const std::vector<RunTensor> tensors = run.tensors();
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const RunTensor& t) { return t.name == name; });
  REQUIRE(found != tensors.end());
  CHECK(found->shape == Extents{64, 32});
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

TEST_CASE("gradients of the last step can be read, and have the norm that is logged") {
  TinyFiles files;
  RunRequests requests;
  TrainingRun run(files.config());
  run.open_for_training(requests);
  run.start();
  const std::string one = "gradient/embedding.weight";
  check_refused(ErrorCode::config, {"no gradient before the first step"}, [&] { run.read(one); });
  CHECK(run.step());
  double squares = 0;
  for (const RunTensor& tensor : run.tensors())
    if (tensor.name.starts_with("gradient/"))
      for (float value : run.read(tensor.name)) squares += double{value} * value;
  const double targets = 2 * 16;
  CHECK(std::sqrt(squares) / targets == doctest::Approx(run.position().gradient_norm).epsilon(1e-5));
  check_refused(ErrorCode::config, {"cannot be written"}, [&] { run.write(one, run.read(one)); });
}

TEST_CASE("a learning rate that is set replaces the schedule's until it is taken back") {
  TinyFiles files;
  RunRequests requests;
  TrainingRun run(files.config());
  run.open_for_training(requests);
  CHECK(run.step());
  CHECK(run.position().learning_rate == doctest::Approx(5e-3));  // half way through the warm-up
  CHECK(run.position().gradient_norm > 0);
  run.set_learning_rate(0);
  const std::vector<float> before = run.read("master/embedding.weight");
  CHECK(run.step());
  CHECK(run.position().learning_rate == 0);
  CHECK(run.read("master/embedding.weight") == before);
  run.set_learning_rate({});
  CHECK(run.learning_rate() > 0);
  CHECK(run.step());
  CHECK(run.read("master/embedding.weight") != before);
}

namespace {

/// Rows that count upwards, in order; its state is the number of rows taken.
struct Counting final : Dataset {
  struct Source final : DataSource {
    explicit Source(Geometry geometry) : geometry(geometry) {}
    std::int64_t vocabulary() const override { return 64; }
    std::int64_t epoch_tokens() const override { return geometry.batch * geometry.sequence; }
    void next(Batch& batch) override {
      batch = {};
      for (std::int64_t row = 0; row < geometry.batch; ++row, ++rows)
        for (std::int64_t i = 0; i < geometry.sequence; ++i) {
          batch.tokens.push_back(static_cast<std::int32_t>((rows + i) % 64));
          batch.targets.push_back(static_cast<std::int32_t>((rows + i + 1) % 64));
          batch.positions.push_back(static_cast<std::int32_t>(i));
        }
    }
    std::string save_state() const override { return std::to_string(rows); }
    void load_state(const std::string& state) override { rows = std::stoll(state); }
    Geometry geometry;
    std::int64_t rows = 0;
  };
  bool has(Split split) const override { return split == Split::train; }
  std::unique_ptr<DataSource> open(const DataRequest& request) const override {
    return std::make_unique<Source>(request.geometry);
  }
};

struct Collecting final : LogSink {
  explicit Collecting(std::vector<std::string>& kinds) : kinds(kinds) {}
  void open(const RunPlace&) override {}
  void write(const LogEvent& event) override { kinds.push_back(event.kind); }
  std::vector<std::string>& kinds;
};

}  // namespace

TEST_CASE("a config given as text selects the program's own data and log sink") {
  TinyFiles files;
  std::vector<std::string> kinds;
  RunConfig config{.file = "a program", .text = read_text(files.config())};
  config.overrides = {"data.id=counting", "log.sinks=[\"collecting\"]"};
  config.components.add<Dataset>("counting", "rows that count", {},
                                 [](const OptionValues&) { return std::make_unique<Counting>(); });
  config.components.add<LogSink>("collecting", "kinds of events", {},
                                 [&kinds](const OptionValues&) { return std::make_unique<Collecting>(kinds); });
  CHECK(has(resolved_config(config), "id = \"counting\""));
  RunRequests requests;
  TrainingRun run(config);
  run.open_for_training(requests);
  CHECK(run.step());
  const double first = run.position().loss;
  CHECK(run.train().finished);
  CHECK(run.position().loss < first - 0.3);  // the next token is the last plus one
  CHECK(std::count(kinds.begin(), kinds.end(), "step") == 8);
  config.overrides.push_back("train.step=1");
  check_refused(ErrorCode::config, {"train.step", "nearest name `steps`"}, [&] { resolved_config(config); });
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

TEST_CASE("as many steps as epochs need, rounded up, are a run of so many steps") {
  TinyFiles files;
  RunRequests requests;
  TrainingRun run(files.config(),
                  {"train.epochs=1.5", "train.steps=1", files.run("epochs"), "checkpoint.export=false"});
  const double tokens = 1.5 * static_cast<double>(run.open_data(Split::train)->epoch_tokens());
  const auto steps = static_cast<std::int64_t>(std::ceil(tokens / static_cast<double>(run.geometry().tokens())));
  REQUIRE(steps > 2);
  run.open_for_training(requests);
  CHECK(run.train().step == steps);
  REQUIRE(quern_train(files, {"train.steps=" + std::to_string(steps), files.run("steps")}).code == 0);
  CHECK(logged_losses(files.at("epochs")) == logged_losses(files.at("steps")));
  check_refused(ErrorCode::config, {"train.epochs", "more steps than a run can have"}, [&] {
    TrainingRun endless(files.config(), {"train.epochs=1e12", files.run("endless")});
    endless.open_for_training(requests);
  });
}

TEST_CASE("the order of the data has a seed of its own, where it is given") {
  TinyFiles files;
  auto first_tokens = [&](const Overrides& seeds) {
    Batch batch;
    TrainingRun run(files.config(), seeds);
    run.open_data(Split::train)->next(batch);
    return batch.tokens;
  };
  CHECK(first_tokens({"train.seed=7"}) != first_tokens({"train.seed=8"}));
  CHECK(first_tokens({"train.seed=7", "data.seed=8"}) == first_tokens({"train.seed=8"}));
}

TEST_CASE("a group's initial values have its deviation, or are zeros") {
  TinyFiles files;
  RunRequests requests;
  TrainingRun run(files.config(), {"train.groups=[{match=['model.layers.*.o_proj.*', 'model.layers.*.down_proj.*'], "
                                   "deviation=0}, {match=['embedding.weight'], deviation=0.5}]"});
  run.open_for_training(requests);
  run.start();
  auto deviation = [&](const std::string& name) {
    double squares = 0;
    const std::vector<float> values = run.read("master/" + name);
    for (float value : values) squares += double{value} * value;
    return std::sqrt(squares / static_cast<double>(values.size()));
  };
  for (const char* zero : {"o.weight/0", "o.weight/1", "down.weight/1"}) CHECK(deviation(zero) == 0);
  CHECK(deviation("embedding.weight") == doctest::Approx(0.5).epsilon(0.1));
  CHECK(deviation("qkv.weight/0") == doctest::Approx(0.02).epsilon(0.1));
}

TEST_CASE("a plan whose micro-batch was chosen has all schedules") {
  TinyFiles files;
  TrainingRun run(files.config(), {"memory.device_budget=1GiB"});
  run.choose_micro_batch();
  CHECK(run.show_schedule("update").find("launch") != std::string::npos);
  CHECK(run.show_schedule("evaluate").find("launch") != std::string::npos);
}
