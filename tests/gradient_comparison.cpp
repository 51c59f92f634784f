#include "gradient_comparison.h"

#include <algorithm>
#include <cmath>

#include "engine/engine.h"
#include "run/run_schemas.h"
#include "run/session.h"
#include "run/weights.h"

namespace quern::testing {

namespace {

constexpr int kHistoryBatches = 4;

/// A run's components and engine under some overrides; parameters and gradients are fp32, whatever the config says.
class Arm {
 public:
  Arm(ConfigDocument document, const std::vector<std::string>& overrides)
      : host_(run_host()),
        config_(resolve(prepared(document, overrides), run_schemas(), host_)),
        session_(config_, host_),
        engine_(opened(*session_.device, session_.device_options),
                make_plan(session_.parts(), session_.plan_options())) {}

  Session& session() { return session_; }
  Engine& engine() { return engine_; }

  ParameterTensors read(const std::string& kind) {
    ParameterTensors tensors;
    for (const PlannedTensor& tensor : engine_.plan().tensors) {
      if (tensor.kind != kind) continue;
      std::vector<float> values(static_cast<std::size_t>(element_count(tensor.extents)));
      engine_.read(tensor, values.data());
      tensors[tensor.parameter].push_back(std::move(values));
    }
    return tensors;
  }

  void write_masters(const ParameterTensors& masters) {
    std::map<std::string, std::size_t> next;
    for (const PlannedTensor& tensor : engine_.plan().tensors)
      if (tensor.kind == "master") engine_.write(tensor, masters.at(tensor.parameter)[next[tensor.parameter]++].data());
    engine_.refresh();
  }

 private:
  static ConfigDocument& prepared(ConfigDocument& document, const std::vector<std::string>& overrides) {
    for (const std::string& override : overrides) document.set(override);
    for (const char* fixed : {"optimizer.master=fp32", "optimizer.gradient=fp32"}) document.set(fixed);
    return document;
  }
  static Device& opened(Device& device, const DeviceOptions& options) {
    device.open(static_cast<int>(options.ordinal));
    return device;
  }

  PluginHost host_;
  ResolvedConfig config_;
  Session session_;
  Engine engine_;
};

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * b[i];
  return sum;
}

}  // namespace

std::vector<GradientRecipe> gradient_recipes() {
  auto e4m3 = [](const std::string& scaling) -> std::vector<std::string> {
    return {"precision.id=e4m3", "precision.e4m3.activation_scaling=" + scaling,
            "precision.e4m3.gradient_scaling=" + scaling};
  };
  return {{"fp32", {"precision.id=fp32"}},
          {"bf16", {"precision.id=bf16"}},
          {"e4m3 delayed", e4m3("delayed")},
          {"e4m3 current", e4m3("current")},
          {"e4m3 row", e4m3("row")},
          {"e4m3 block", e4m3("block")},
          {"e4m3, gradients e5m2", {"precision.id=e4m3", "precision.e4m3.gradient_format=e5m2"}},
          {"e4m3, head gradients e4m3", {"precision.id=e4m3", "precision.e4m3.head_gradient_format=e4m3"}},
          {"e4m3, head bf16", {"precision.id=e4m3", "precision.e4m3.head=bf16"}},
          {"e5m2", {"precision.id=e5m2"}},
          {"int8", {"precision.id=int8"}}};
}

GradientProbe::GradientProbe(const ConfigDocument& config, std::int64_t steps) : config_(config) {
  Arm arm(config_, {"precision.id=fp32", "train.steps=" + std::to_string(std::max<std::int64_t>(steps, 1))});
  const Session& session = arm.session();
  Engine& engine = arm.engine();
  for (const ParameterPlan& parameter : engine.plan().parameters) parameters_.push_back(parameter.spec.name);
  auto seed = static_cast<std::uint64_t>(session.train.seed);
  initialise_weights(engine, seed);
  std::unique_ptr<DataSource> data = session.open_data(Split::train);
  Batch batch;
  for (std::int64_t step = 0; step < steps; ++step) {
    StepState state{.step = static_cast<std::uint32_t>(step),
                    .seed_low = static_cast<std::uint32_t>(seed),
                    .seed_high = static_cast<std::uint32_t>(seed >> 32),
                    .learning_rate = static_cast<float>(session.optimizer_options.learning_rate *
                                                        session.schedule->factor(step, steps)),
                    .clip_norm = static_cast<float>(session.optimizer_options.clip_norm),
                    .updates = static_cast<std::uint32_t>(step)};
    for (std::int64_t micro_step = 0; micro_step < session.train.accumulation; ++micro_step) {
      data->next(batch);
      state.micro_step = static_cast<std::uint32_t>(micro_step);
      engine.micro_step(batch, state, {.first = micro_step == 0, .last = micro_step + 1 == session.train.accumulation});
    }
    engine.update();
    LossStats loss = engine.result().loss;
    loss_ = loss.loss_sum / loss.valid_tokens;
  }
  masters_ = arm.read("master");
  for (int i = 0; i < kHistoryBatches + 2; ++i) data->next(batches_.emplace_back());
}

ParameterTensors GradientProbe::gradients(const GradientRecipe& recipe, Measured measured) const {
  Arm arm(config_, recipe.overrides);
  arm.write_masters(masters_);
  for (int i = 0; i < kHistoryBatches; ++i) {
    arm.engine().micro_step(batches_[static_cast<std::size_t>(i)], {});
    arm.engine().update();
    arm.engine().result();
  }
  arm.engine().micro_step(batches_[kHistoryBatches + (measured == Measured::batch ? 0 : 1)], {});
  return arm.read("gradient");
}

Agreement agreement(const std::vector<std::vector<float>>& got, const std::vector<std::vector<float>>& reference) {
  Agreement result{.least = 1};
  double product = 0, square = 0, reference_square = 0;
  for (std::size_t layer = 0; layer < got.size(); ++layer) {
    const std::vector<float>&a = got[layer], &b = reference[layer];
    const double ab = dot(a, b), aa = dot(a, a), bb = dot(b, b);
    product += ab, square += aa, reference_square += bb;
    result.least = std::min(result.least, ab / std::sqrt(aa * bb));
  }
  result.cosine = product / std::sqrt(square * reference_square);
  result.norm_ratio = std::sqrt(square / reference_square);
  return result;
}

}  // namespace quern::testing
