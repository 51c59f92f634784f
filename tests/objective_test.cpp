// What a model declares beyond tokens: inputs of its own, a loss of its own, and further terms of the objective. The
// model's losses are made of one op, the mean square of a row, which has an ordinary backward rule.
#include <cmath>

#include <doctest/doctest.h>

#include "quern/testkit/refusal.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;
using testkit::check_refused;

namespace {

/// mean_square(x (N, C)) -> y (N) f32, and mean_square_grad(dy, x) -> dx.
class MeanSquare final : public Kernel {
 public:
  explicit MeanSquare(bool gradient) : gradient_(gradient) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    const View& x = in[gradient_ ? 1 : 0];
    const auto* values = x.as<float>();
    const std::int64_t columns = x.columns();
    for (std::int64_t row = 0; row < x.rows(); ++row) {
      float sum = 0;
      for (std::int64_t c = 0; c < columns; ++c) {
        const float value = values[row * columns + c], slope = 2 * value / static_cast<float>(columns);
        if (gradient_) out[0].as<float>()[row * columns + c] = in[0].as<float>()[row] * slope;
        sum += value * value;
      }
      if (!gradient_) out[0].as<float>()[row] = sum / static_cast<float>(columns);
    }
  }

 private:
  bool gradient_;
};

std::vector<OpSpec> own_ops() {
  return {{.kind = "mean_square",
           .inputs = {"x"},
           .outputs = {"y"},
           .infer =
               [](InferContext& c) {
                 c.outputs[0].shape = {c.inputs[0]->shape[0]};
                 c.outputs[0].dtype = DType::f32;
               },
           .backward =
               [](BackwardContext& c) {
                 c.emit("mean_square_grad", {c.output_grad(), c.input(0)}, {0});
               }},
          {.kind = "mean_square_grad", .inputs = {"dy", "x"}, .outputs = {"dx"}, .infer = [](InferContext& c) {
             c.outputs[0].shape = c.inputs[1]->shape;
             c.outputs[0].dtype = c.inputs[1]->dtype;
           }}};
}

struct Form {
  double block_term = 0, head_term = 0;  ///< weights of mean squares, of each layer's stream and of the last
  bool own_loss = false;                 ///< the mean square in place of lm_loss
  bool features = false;                 ///< input "features" (N, width) f32 is added to the embedding
  bool causal = true;
  bool targets = true;
};

class OwnModel final : public testkit::TinyModel {
 public:
  explicit OwnModel(Form form) : form_(form) {}
  ModelTraits traits() const override {
    ModelTraits traits = TinyModel::traits();
    traits.causal = form_.causal;
    return traits;
  }
  void embed(ProgramBuilder& b) const override {
    if (!form_.features) return TinyModel::embed(b);
    const ValueId features = b.input("features", {Dim::tokens(), 16}, DType::f32);
    b.output(b.add(b.embedding(b.tokens(), "embedding.weight"), features, "with_features"));
  }
  void block(ProgramBuilder& b, std::int64_t layer) const override {
    TinyModel::block(b, layer);
    constexpr ValueId kStream = 0;  // which the block takes first
    if (form_.block_term != 0) b.add_loss(square(b, kStream), form_.block_term);
  }
  void head(ProgramBuilder& b) const override {
    const ValueId x = b.rms_norm(b.stream(16), "final_norm.weight", 1e-6, "final_norm");
    if (form_.head_term != 0) b.add_loss(square(b, x), form_.head_term);
    if (!form_.own_loss) return b.output(b.lm_loss(x, "lm_head.weight"));
    if (form_.targets) b.targets();
    b.output(square(b, b.linear(x, "lm_head.weight", "logits")));
  }

 private:
  static ValueId square(ProgramBuilder& b, ValueId x) { return b.op("mean_square", {x}, "square")[0]; }
  Form form_;
};

struct ModelRun {
  explicit ModelRun(const Form& form, PlanOptions options = tiny_options()) : model(form), device(cpu_device()) {
    for (const char* kind : {"mean_square", "mean_square_grad"})
      device->add_kernel({"cpu", kind, [](const OpInstance& op) {
                            return std::make_unique<MeanSquare>(op.kind == "mean_square_grad");
                          }});
    static const testkit::PlainPrecision plain;
    static const AdamW adamw{AdamWOptions{}};
    static const std::vector<OpSpec> ops = own_ops();
    trial = std::make_unique<conformance::Trial>(plugin_host(), make_plan({model, plain, *device, adamw, ops}, options),
                                                 *device);
  }
  conformance::Tensors gradients(std::uint64_t seed) { return trial->gradients(random_batch(trial->plan(), seed)); }
  double loss(std::uint64_t seed) { return trial->loss_sum(random_batch(trial->plan(), seed)); }

  OwnModel model;
  std::unique_ptr<Device> device;
  std::unique_ptr<conformance::Trial> trial;
};

}  // namespace

TEST_CASE("terms of the objective, in layers and in the head, are in the loss and in all gradients") {
  for (const Form& form : {Form{.block_term = 0.3},
                           {.head_term = 0.7},
                           {.block_term = 0.3, .head_term = 0.7},
                           {.own_loss = true},
                           {.block_term = 0.2, .own_loss = true, .features = true}}) {
    CAPTURE(form.block_term);
    CAPTURE(form.head_term);
    CAPTURE(form.own_loss);
    ModelRun run(form);
    const conformance::Tensors gradients = run.gradients(3);
    const LossStats stats = run.trial->engine().result().loss;
    CHECK(stats.loss_sum == doctest::Approx(run.loss(3)).epsilon(1e-6));
    const Batch batch = random_batch(run.trial->plan(), 3);
    CHECK(stats.valid_tokens ==
          std::count_if(batch.targets.begin(), batch.targets.end(), [](int t) { return t >= 0; }));
    for (const PlannedTensor& master : run.trial->plan().tensors) {
      if (master.kind != "master") continue;
      const std::string name = conformance::tensor_name(master);
      CAPTURE(name);
      const std::vector<float>& gradient = gradients.at(name);
      const std::vector<float> values = run.trial->tensor("master", master.parameter, master.layer);
      double norm = 0;
      for (float g : gradient) norm += double{g} * g;
      norm = std::sqrt(norm);
      if (norm < 1e-4) continue;
      const double step = 0.02 / norm;
      double losses[2];
      for (int side : {0, 1}) {
        std::vector<float> moved = values;
        for (std::size_t i = 0; i < moved.size(); ++i)
          moved[i] += static_cast<float>((side ? 1 : -1) * step * gradient[i] / norm);
        run.trial->write("master", master.parameter, master.layer, moved);
        losses[side] = run.loss(3);
      }
      run.trial->write("master", master.parameter, master.layer, values);
      CHECK((losses[1] - losses[0]) / (2 * step) == doctest::Approx(norm).epsilon(5e-3));
    }
  }
}

TEST_CASE("a term changes no bit of the loss beside it, and trains alike whatever is recomputed") {
  ModelRun plain({}), zero({.block_term = 1e-30, .head_term = 1e-30});
  CHECK(plain.loss(4) == zero.loss(4));
  PlanOptions recompute = tiny_options();
  recompute.recompute = {"block"};
  const Form form{.block_term = 0.3, .head_term = 0.7};
  ModelRun kept(form), again(form, recompute);
  CHECK(kept.gradients(5) == again.gradients(5));
}

TEST_CASE("what a loss does not have is refused by name") {
  PlanOptions z = tiny_options(), texts = tiny_options();
  z.z_loss = 1e-4;
  texts.next_logits = true;
  check_refused(ErrorCode::config, {"train.z_loss", "mean_square"}, [&] { ModelRun({.own_loss = true}, z); });
  check_refused(ErrorCode::config, {"gives no logits", "mean_square"}, [&] { ModelRun({.own_loss = true}, texts); });
  check_refused(ErrorCode::config, {"not causal"}, [&] { ModelRun({.causal = false}, texts); });
  check_refused(ErrorCode::config, {"not a loss for each of the input targets"},
                [&] { ModelRun({.own_loss = true, .targets = false}); });
  ModelRun({}, z);  // lm_loss has all of it
  ModelRun({.block_term = 0.1, .head_term = 0.1}, texts);
}

TEST_CASE("declared inputs reach the model, and data without them are refused by name") {
  ModelRun run({.features = true});
  Batch batch = random_batch(run.trial->plan(), 6);
  const double before = run.trial->loss_sum(batch);
  batch.set("features", std::span<const float>(std::vector<float>(16 * 16, 0.5f)));
  CHECK(run.trial->loss_sum(batch) != before);
  batch.set("features", std::span<const float>(std::vector<float>(16, 0.5f)));
  check_refused(ErrorCode::config, {"input features", "16 elements", "(16, 16) f32"},
                [&] { run.trial->loss_sum(batch); });
  batch.inputs.clear();
  check_refused(ErrorCode::config, {"input features: the data do not give it", "(16, 16) f32"},
                [&] { run.trial->loss_sum(batch); });
}

TEST_CASE("integers that are not below their bound are refused, and two declarations of an input agree") {
  const OpSet ops = builtin_ops();
  ProgramBuilder b("head", {.ops = &ops});
  b.input("labels", {Dim::rows()}, DType::i32);
  CHECK_NOTHROW(b.input("labels", {Dim::rows()}, DType::i32, 10));
  check_refused(ErrorCode::config, {"input labels", "(B) i32 below 5", "(B) i32 below 10"},
                [&] { b.input("labels", {Dim::rows()}, DType::i32, 5); });
  check_refused(ErrorCode::config, {"input labels", "(N) i32"},
                [&] { b.input("labels", {Dim::tokens()}, DType::i32); });
}

TEST_CASE("targets are discounted by token, or by row") {
  Batch tokens, rows;
  tokens.targets = {1, 2, 3, 4, 5, 6};
  rows.targets = {1, 2, 3};
  tokens.discount(3, {3, 2});
  rows.discount(3, {3, 2});
  CHECK(tokens.targets == std::vector<std::int32_t>{1, 2, 3, -1, -1, -1});
  CHECK(rows.targets == std::vector<std::int32_t>{1, 2, -1});
  rows.discount(0, {3, 2});
  CHECK(rows.targets == std::vector<std::int32_t>{-1, -1, -1});
}
