// State of a model's own programs: read by ops, advanced once per optimizer step by sums over that step's
// micro-batches. The model takes the running mean of its input "features" from them in `embed`, and of the stream in
// each layer.
#include <algorithm>
#include <cmath>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "checkpoint/saved_state.h"
#include "plan/schedule.h"
#include "quern/testkit/refusal.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;
using testkit::check_refused;

namespace {

constexpr std::int64_t kWidth = 16;
constexpr float kMomentum = 0.75f;

/// column_totals(x (N, C)) -> (C + 1) f64, the last the number of rows; centred(x, mean (C)) -> x - mean;
/// advance_mean(mean, totals): mean becomes kMomentum mean + (1 - kMomentum) totals / rows.
class OwnKernel final : public Kernel {
 public:
  OwnKernel(std::string kind, bool add) : kind_(std::move(kind)), add_(add) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    if (kind_ == "advance_mean") {
      for (std::int64_t c = 0; c < kWidth; ++c)
        in[0].as<float>()[c] = kMomentum * in[0].as<float>()[c] +
                               (1 - kMomentum) * static_cast<float>(in[1].as<double>()[c] / in[1].as<double>()[kWidth]);
      return;
    }
    const bool totals = kind_ == "column_totals";
    if (totals && !add_) std::fill_n(out[0].as<double>(), kWidth + 1, 0.0);
    for (std::int64_t i = 0; i < in[0].count(); ++i) {
      if (totals)
        out[0].as<double>()[i % kWidth] += in[0].as<float>()[i];
      else
        out[0].as<float>()[i] = in[0].as<float>()[i] - in[1].as<float>()[i % kWidth];
    }
    if (totals) out[0].as<double>()[kWidth] += static_cast<double>(in[0].rows());
  }

 private:
  std::string kind_;
  bool add_;
};

std::vector<OpSpec> own_ops() {
  auto like_x = [](InferContext& c) { c.outputs[0].shape = c.inputs[0]->shape, c.outputs[0].dtype = DType::f32; };
  return {{.kind = "column_totals",
           .inputs = {"x"},
           .outputs = {"totals"},
           .infer = [](InferContext& c) { c.outputs[0].shape = {kWidth + 1}, c.outputs[0].dtype = DType::f64; },
           .statistics = true},
          {.kind = "centred",
           .inputs = {"x", "mean"},
           .outputs = {"y"},
           .infer = like_x,
           .backward = [](BackwardContext& b) { b.set_input_grad(0, b.output_grad()); }},
          {.kind = "advance_mean",
           .inputs = {"mean", "totals"},
           .outputs = {"advanced"},
           .infer = like_x,
           .updates = {{0, 0}}}};
}

class CentredModel final : public testkit::TinyModel {
 public:
  void embed(ProgramBuilder& b) const override {
    const ValueId features = centre(b, b.input("features", {Dim::tokens(), kWidth}, DType::f32));
    b.output(b.add(b.embedding(b.tokens(), "embedding.weight"), features, "with_features"));
  }
  void block(ProgramBuilder& b, std::int64_t layer) const override {
    TinyModel::block(b, layer);
    Program program = b.take();
    const ValueId result = program.outputs[0];
    program.outputs.clear();
    b.replace(std::move(program));
    b.output(centre(b, result));
  }

 private:
  static ValueId centre(ProgramBuilder& b, ValueId x) {
    const ValueId mean = b.state({.name = "mean", .extents = {kWidth}, .advance = "advance_mean"});
    b.advance_by(mean, b.op("column_totals", {x}, "totals")[0]);
    return b.op("centred", {x, mean}, "centred")[0];
  }
};

Plan plan_of(const PlanOptions& options, const Device& device) {
  static const CentredModel model;
  static const testkit::PlainPrecision plain;
  static const AdamW adamw{AdamWOptions{}};
  static const std::vector<OpSpec> ops = own_ops();
  return make_plan({model, plain, device, adamw, ops}, options);
}

std::unique_ptr<conformance::Trial> trial_of(const PlanOptions& options) {
  static const std::unique_ptr<Device> device = [] {
    std::unique_ptr<Device> made = cpu_device();
    for (const char* kind : {"column_totals", "centred", "advance_mean"})
      made->add_kernel({"cpu", kind, [](const OpInstance& op) {
                          return std::make_unique<OwnKernel>(op.kind, op.outputs[0].accumulate);
                        }});
    return made;
  }();
  return std::make_unique<conformance::Trial>(plugin_host(), plan_of(options, *device), *device);
}

}  // namespace

TEST_CASE("a state advances by the sums of a step's micro-batches and by nothing else") {
  const auto trial = trial_of(tiny_options());
  trial->engine().refresh();
  auto mean = [&](int layer = -1) { return trial->tensor(layer < 0 ? "embed.mean" : "mean", "", layer); };
  CHECK(mean() == std::vector<float>(kWidth, 0.0f));
  std::vector<float> want(kWidth, 0.0f);
  for (std::uint32_t step = 0; step < 3; ++step) {
    std::vector<double> sums(kWidth, 0.0);
    std::int64_t rows = 0;
    for (std::uint32_t micro_step = 0; micro_step < 1 + step; ++micro_step) {
      const Batch batch = random_batch(trial->plan(), 10 * step + micro_step);
      const auto* features = reinterpret_cast<const float*>(batch.inputs.at("features").data());
      const auto tokens = static_cast<std::int64_t>(batch.tokens.size());
      for (std::int64_t i = 0; i < tokens * kWidth; ++i) sums[static_cast<std::size_t>(i % kWidth)] += features[i];
      rows += tokens;
      trial->engine().micro_step(batch, {.step = step, .micro_step = micro_step, .learning_rate = 1e-2f},
                                 {.first = micro_step == 0});
      trial->loss(batch);  // an evaluation between them adds nothing
      CHECK(mean() == want);
    }
    trial->engine().update();
    for (std::size_t c = 0; c < want.size(); ++c)
      want[c] = kMomentum * want[c] + (1 - kMomentum) * static_cast<float>(sums[c] / static_cast<double>(rows));
    const std::vector<float> got = mean();
    for (std::size_t c = 0; c < want.size(); ++c) CHECK(got[c] == doctest::Approx(want[c]).epsilon(1e-6));
    want = got;
  }
  CHECK(mean(0) != mean(1));  // a layer has its own
  const Batch batch = random_batch(trial->plan(), 77);
  const double before = trial->loss(batch);
  trial->write("mean", "", 1, std::vector<float>(kWidth, 3.0f));
  CHECK(trial->loss(batch) != before);
}

TEST_CASE("a state is in checkpoints, and no choice of recomputation changes it") {
  conformance::resumes([] { return trial_of(tiny_options()); });
  PlanOptions recompute = tiny_options();
  recompute.recompute = {"block"};
  const auto kept = trial_of(tiny_options()), again = trial_of(recompute);
  for (const auto& trial : {kept.get(), again.get()}) trial->train(0, 3);
  const conformance::State state = kept->state();
  CHECK(state.contains("embed.mean"));
  CHECK(state.contains("mean/1"));
  CHECK(conformance::first_difference(again->state(), state).empty());
}

TEST_CASE("a model's state is kept where the precision changes, and no run goes on without it") {
  const auto trial = trial_of(tiny_options());
  trial->train(0, 2);
  const conformance::State saved = trial->state();
  std::vector<NamedView> whole;
  for (const PlannedTensor& tensor : training_state(trial->plan())) {
    auto* const data = const_cast<std::byte*>(saved.at(state_name(tensor)).data());
    whole.push_back({state_name(tensor), {data, tensor.dtype, tensor.whole_extents()}});
  }
  std::vector<NamedView> lacking = whole;
  std::erase_if(lacking, [](const NamedView& tensor) { return tensor.name == "mean/1"; });
  const TestDirectory directory;
  auto written = [&](std::int64_t step, const std::vector<NamedView>& tensors) {
    return read_checkpoint(write_checkpoint(directory.path(), {.step = step}, tensors));
  };
  const Checkpoint full = written(1, whole), partial = written(2, lacking);
  const std::vector<std::string> changed{"precision.id = \"bf16\" (was \"fp32\")"};
  for (const bool train : {true, false}) {
    PlanOptions options = tiny_options();
    options.train = train;
    const auto other = trial_of(options);
    CHECK(load_state(other->engine(), full, changed).empty());
    CHECK(other->tensor("mean", "", 1) == trial->tensor("mean", "", 1));
    check_refused(ErrorCode::input, {"its model's states differ: 'mean/1' found none"},
                  [&] { load_state(other->engine(), partial, changed); });
  }
}

TEST_CASE("ranks add up what a state advances by before it advances, and reproducible sums refuse it") {
  PlanOptions options = tiny_options();
  options.state.ranks = 2;
  options.state.meet = true;
  for (const int machines : {1, 2}) {
    options.state.machines = machines;
    const Plan plan = plan_of(options, PlanningDevice());
    std::vector<std::string> sums;
    std::size_t advanced = 0;
    for (const Action& action : plan.schedules[Run::update].actions) {
      const std::string kind = action.task < 0 ? "" : plan.schedules.task_of(action).instance.kind;
      if (action.kind == ActionKind::collective && kind == "all_reduce")
        for (const Access& read : plan.schedules[Run::update].reads(action))
          sums.push_back(plan.schedules.values[static_cast<std::size_t>(read.value)]);
      if (kind != "advance_mean") continue;
      ++advanced;
      CHECK(std::any_of(sums.begin(), sums.end(),
                        [](const std::string& name) { return name.find("totals") != name.npos; }));
    }
    CHECK(advanced == 3);
  }
  options.state.in_tree = 2;
  check_refused(ErrorCode::config, {"parallel.reduction", "states of the model"},
                [&] { plan_of(options, PlanningDevice()); });
}

TEST_CASE("a state that is no state, or statistics that are none, are refused by name") {
  OpSet ops = builtin_ops();
  for (const OpSpec& spec : own_ops()) ops.add(spec);
  ProgramBuilder b("block", {.ops = &ops, .parameters = {}});
  const ValueId x = b.stream(kWidth);
  check_refused(ErrorCode::config, {"state mean", "bf16", "f32"},
                [&] { b.state({.name = "mean", .dtype = DType::bf16, .extents = {kWidth}}); });
  check_refused(ErrorCode::config, {"state mean", "op add", "output 0 is input 0"},
                [&] { b.state({.name = "mean", .extents = {kWidth}, .advance = "add"}); });
  check_refused(ErrorCode::config, {"state x", "a value of that name"},
                [&] { b.state({.name = "x", .extents = {kWidth}}); });
  const ValueId mean = b.state({.name = "mean", .extents = {kWidth}, .advance = "advance_mean"});
  check_refused(ErrorCode::config, {"no state advances by this", "mean by x"}, [&] { b.advance_by(mean, x); });
  const ValueId totals = b.op("column_totals", {x}, "totals")[0];
  check_refused(ErrorCode::config, {"no state advances by this", "x by totals"}, [&] { b.advance_by(x, totals); });
}
