// Plans for a device that takes its fused forms at some sizes only.
#include "plan/programs/program_set.h"

#include <algorithm>

#include <doctest/doctest.h>

#include "plan/test_plans.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"
#include "quern/testkit/tiny_model.h"

using namespace quern;

namespace {

int count_kind(const Program& program, const std::string& kind) {
  return static_cast<int>(
      std::count_if(program.ops.begin(), program.ops.end(), [&](const Op& op) { return op.kind == kind; }));
}

}  // namespace

TEST_CASE("a fused form is planned where the device takes it, and its parts elsewhere") {
  PlanningDevice device([](const OpInstance& op) {
    const bool large = op.kind == "add_rms_norm" && op.inputs[0].extents[0] > 32;
    return OpSupport{large ? "more than 32 tokens" : "", 0};
  });
  device.own_fusions = {{"add_rms_norm", "s = add(a, b); y, r = rms_norm(s, w)"}};
  for (std::int64_t sequence : {16, 17}) {
    PlanOptions options;
    options.geometry = {2, sequence};
    options.next_logits = true;
    const Plan plan = tiny_plan(options, device);
    const int fused = sequence == 16 ? 1 : 0;
    CAPTURE(sequence);
    for (const PlacedProgram* head : {&plan.head_train, &plan.head_evaluate, &plan.head_next}) {
      CHECK(count_kind(head->program, "add_rms_norm") == fused);
      CHECK(count_kind(head->program, "rms_norm") == 1 - fused);
    }
    const LayerClass& layer = plan.layer_class(1);
    for (const PlacedProgram* half : {&layer.forward, &layer.evaluate}) {
      CHECK(count_kind(half->program, "add_rms_norm") == 2 * fused);
      CHECK(count_kind(half->program, "add") == 2 - 2 * fused);
    }
  }
}

namespace {

/// Linears read a transposed copy of their weight.
class Turning final : public testkit::PlainPrecision {
 public:
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product != Product::output) return lower_to_matmul(site, lowering);
    const ValueId turned = lowering.emit("transpose", {site.weight}, {}, std::string(site.parameter) + ".t")[0];
    lowering.produce("matmul", {site.x, turned, site.bias},
                     {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{0}}});
  }
};

}  // namespace

TEST_CASE("programs that train and that evaluate read as stored what the device takes so") {
  for (const bool takes : {false, true}) {
    const PlanningDevice device([&](const OpInstance& op) {
      const bool turned = op.kind == "matmul" && op.attributes.integer("transpose_b") == 1;
      return OpSupport{turned && !takes ? "no" : "", 0};
    });
    const Plan plan = tiny_plan(tiny_options(), device, Turning());
    const LayerClass& layer = plan.layer_class(1);
    for (const PlacedProgram* half : {&layer.forward, &layer.evaluate})
      CHECK(count_kind(half->program, "transpose") == (takes ? 0 : 4));
  }
}

namespace {

/// A model whose head passes its stream through an op that states no gradient.
class Stopped final : public testkit::TinyModel {
 public:
  using TinyModel::TinyModel;
  void head(ProgramBuilder& b) const override {
    const ValueId x = b.op("stop", {b.stream(traits().width)}, "stopped")[0];
    b.output(b.lm_loss(b.rms_norm(x, "final_norm.weight", 1e-6, "normed"), "lm_head.weight"));
  }
};

}  // namespace

TEST_CASE("an op that states no gradient is refused by name where a parameter before it trains, and else stops there") {
  const std::vector<OpSpec> ops{
      {.kind = "stop",
       .inputs = {"x"},
       .outputs = {"y"},
       .infer =
           [](InferContext& c) { c.outputs[0].shape = c.inputs[0]->shape, c.outputs[0].dtype = c.inputs[0]->dtype; },
       .backward = [](BackwardContext&) {}}};
  auto plan_with = [&](const Stopped& model) {
    return plan_of(model, tiny_options(), PlanningDevice(), testkit::PlainPrecision(), ops);
  };
  testkit::check_refused(ErrorCode::config, {"program head", "no gradient", "its input"},
                         [&] { plan_with(Stopped()); });
  const Plan plan = plan_with(Stopped({.frozen = {"embedding", "attn_norm", "qkv", "o.", "ffn_norm", "up", "down"}}));
  CHECK(plan.embed_backward.program.ops.empty());
  for (const LayerClass& layer : plan.classes) CHECK(layer.backward.program.ops.empty());
  CHECK(plan.head_train.program.outputs.empty());
}

namespace {

/// A model whose final norm has another name in checkpoints, and heads.
class Renamed final : public testkit::TinyModel {
 public:
  explicit Renamed(std::string name, std::vector<HeadRows> heads = {})
      : name_(std::move(name)), heads_(std::move(heads)) {}
  std::vector<ParameterSpec> parameters() const override {
    std::vector<ParameterSpec> list = TinyModel::parameters();
    std::ranges::find(list, "final_norm.weight", &ParameterSpec::name)->parts[0].hf_name = name_;
    std::ranges::find(list, "final_norm.weight", &ParameterSpec::name)->parts[0].heads = heads_;
    return list;
  }

 private:
  std::string name_;
  std::vector<HeadRows> heads_;
};

}  // namespace

TEST_CASE(
    "a tensor without a name, with the name that another has in a layer, or with heads that do not fit, is refused") {
  auto plan = [](const std::string& name, std::vector<HeadRows> heads = {}) {
    plan_of(Renamed(name, std::move(heads)), tiny_options());
  };
  CHECK_NOTHROW(plan("a name of its own"));
  testkit::check_refused(ErrorCode::config, {"parameter final_norm.weight", "no name"}, [&] { plan(""); });
  testkit::check_refused(ErrorCode::config, {"parameter final_norm.weight", "one name", "layers.1.qkv.weight"},
                         [&] { plan("layers.1.qkv.weight"); });
  const std::int64_t rows = testkit::TinyModel().traits().width;
  CHECK_NOTHROW(plan("n", {{rows / 2, 1, 2}, {1, rows / 2, 1}}));
  testkit::check_refused(ErrorCode::config, {"parameter final_norm.weight", "heads of n do not have the part's rows"},
                         [&] {
                           plan("n", {{rows - 1, 1, 1}});
                         });
  for (const HeadRows& heads : {HeadRows{1, rows, 2}, HeadRows{rows, 1, 0}, HeadRows{-1, -rows, 1}})
    testkit::check_refused(ErrorCode::config, {"heads of n are not whole groups of at least one head"},
                           [&] { plan("n", {heads}); });
}
