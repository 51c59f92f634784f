// Momentum whose step has one length for each matrix: the momentum divided by its own root mean square over the matrix,
// so that an element moves by about the learning rate, as in Adam, with half of Adam's state.
//
//   m = beta m + (1 - beta) g      w = w - rate (m / (rms(m) + eps) + decay w)
#include <cmath>
#include <cstring>

#include "quern/error.h"
#include "quern/numeric.h"
#include "quern/plugin.h"
#include "quern/step_state.h"

namespace {

using namespace quern;

struct Options {
  double beta = 0.9;
  double eps = 1e-12;
  double weight_decay = 0.1;
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("beta", &Options::beta, "decay of the momentum").at_least(0).at_most(0.9999);
  t.add("eps", &Options::eps, "added to the root mean square").above(0);
  t.add("weight_decay", &Options::weight_decay, "shrinks matrices by this times the learning rate a step").at_least(0);
  return t;
}

float load(const View& view, std::int64_t i) {
  return view.dtype == DType::f32 ? view.as<float>()[i] : bf16_to_float(view.as<std::uint16_t>()[i]);
}

/// matrix_momentum(update, step, gradient, master, momentum) -> master, momentum, in place.
class MatrixMomentumKernel final : public Kernel {
 public:
  explicit MatrixMomentumKernel(const OpInstance& op)
      : beta_(static_cast<float>(op.attributes.real("beta"))),
        eps_(op.attributes.real("eps")),
        decay_(op.attributes.real("decay")),
        rate_(op.attributes.real("rate")) {}

  // What changes from step to step is read from memory: a step may be captured, and never waits for the host.
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    UpdateState update;
    StepState step;
    std::memcpy(&update, in[0].data, sizeof update);
    std::memcpy(&step, in[1].data, sizeof step);
    if (update.apply == 0) return;  // the gradient is not finite: nothing changes
    auto *master = out[0].as<float>(), *momentum = out[1].as<float>();
    double squares = 0;
    const std::int64_t count = out[0].count();
    for (std::int64_t i = 0; i < count; ++i) {
      momentum[i] = beta_ * momentum[i] + (1 - beta_) * update.gradient_scale * load(in[2], i);
      squares += double{momentum[i]} * momentum[i];
    }
    const double length = std::sqrt(squares / static_cast<double>(count)) + eps_;
    const double rate = rate_ * step.learning_rate;
    for (std::int64_t i = 0; i < count; ++i)
      master[i] = static_cast<float>(master[i] - rate * (momentum[i] / length + decay_ * master[i]));
  }

 private:
  float beta_;
  double eps_, decay_, rate_;
};

std::unique_ptr<Kernel> prepare(const OpInstance& op) {
  if (op.inputs[3].dtype != DType::f32)
    throw Error(ErrorCode::config, {.where = "optimizer matrix_momentum",
                                    .what = "has no kernel for master weights of this dtype",
                                    .found = std::string(name_of(op.inputs[3].dtype)),
                                    .expected = "f32",
                                    .next = "set optimizer.master = \"fp32\""});
  return std::make_unique<MatrixMomentumKernel>(op);
}

class MatrixMomentum final : public Optimizer {
 public:
  explicit MatrixMomentum(const Options& options) : o_(options) {}

  std::vector<OptimizerState> states(const ParameterSpec& parameter) const override {
    return {OptimizerState::elements(parameter, "momentum", DType::f32)};
  }
  void update(UpdateBuilder& b, const ParameterSpec& parameter) const override {
    b.op("matrix_momentum", {b.update(), b.step(), b.gradient(), b.master(), b.state("momentum")}, "",
         {{"beta", o_.beta},
          {"eps", o_.eps},
          {"decay", parameter.decay ? o_.weight_decay : 0.0},
          {"rate", parameter.rate}});
  }

 private:
  Options o_;
};

}  // namespace

QUERN_PLUGIN("optimizer", "matrix_momentum", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  // The root mean square is of all elements: the core then cuts no matrix into rows, for ranks or for windows.
  manifest.ops.push_back({.kind = "matrix_momentum",
                          .inputs = {"update", "step", "gradient", "master", "momentum"},
                          .outputs = {"new_master", "new_momentum"},
                          .infer =
                              [](InferContext& c) {
                                for (std::size_t i : {0, 1}) {
                                  c.outputs[i].shape = c.inputs[3 + i]->shape;
                                  c.outputs[i].dtype = c.inputs[3 + i]->dtype;
                                }
                              },
                          .updates = {{0, 3}, {1, 4}},
                          .locality = UpdateLocality::matrix});
  manifest.kernels.push_back({"cpu", "matrix_momentum", prepare});
  manifest.add<Optimizer>(
      "matrix_momentum", "momentum of one length for each matrix", options().specs(),
      [](const OptionValues& values) { return std::make_unique<MatrixMomentum>(options().bind(values)); });
}
