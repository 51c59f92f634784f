// An optimizer whose step is scaled by the ratio of two norms of a whole matrix, as LAMB's is (You et al., "Large Batch
// Optimization for Deep Learning", 2020). `locality` is what it states: anything but "matrix" is its fault, and so are
// that it leaves the last element of a tensor, `tail`, or takes one more, `beyond`; that it rounds bf16 masters to
// nearest, or all elements of a tensor by one draw; that trainings share a counter.
#include <cmath>
#include <cstring>

#include "quern/error.h"
#include "quern/numeric.h"
#include "quern/options.h"
#include "quern/plugin.h"
#include "quern/random.h"
#include "quern/step_state.h"

namespace {

using namespace quern;

template <class Words>
Words words_of(const View& view) {
  Words words;
  std::memcpy(&words, view.data, sizeof words);
  return words;
}

float load(const View& x, std::int64_t i) {
  return x.dtype == DType::f32 ? x.as<float>()[i] : bf16_to_float(x.as<std::uint16_t>()[i]);
}

double norm_of(const View& x) {
  double sum = 0;
  for (std::int64_t i = 0; i < x.count(); ++i) sum += double{load(x, i)} * double{load(x, i)};
  return std::sqrt(sum);
}

/// update, step, and of each tensor gradient, master, moment1, moment2 -> master, moment1, moment2
class RatioKernel final : public Kernel {
 public:
  explicit RatioKernel(const OpInstance& op)
      : left_(op.attributes.integer("tail") - op.attributes.integer("beyond")),
        shared_(op.attributes.integer("shared") != 0),
        draws_(op.attributes.word("masters")) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    const auto update = words_of<UpdateState>(in[0]);
    const auto step = words_of<StepState>(in[1]);
    if (update.apply == 0) return;
    for (std::size_t i = 0; i < out.size(); i += 3) {
      const View &gradient = in[2 + i / 3 * 4], &master = out[i], &moment = out[i + 1];
      for (std::int64_t k = 0; k < master.count(); ++k)
        moment.as<float>()[k] = 0.9f * moment.as<float>()[k] + 0.1f * update.gradient_scale * gradient.as<float>()[k];
      const double moved = norm_of(moment), kept = norm_of(master);
      const double ratio = (moved > 0 && kept > 0 ? kept / moved : 1) + (shared_ ? 1e-3 * launches_++ : 0);
      for (std::int64_t k = 0; k < master.count() - left_; ++k)
        add(master, k, -static_cast<float>(double{step.learning_rate} * ratio) * moment.as<float>()[k], step);
    }
  }

 private:
  void add(const View& master, std::int64_t k, float change, const StepState& step) const {
    if (master.dtype == DType::f32) {
      master.as<float>()[k] += change;
      return;
    }
    std::uint16_t& stored = master.as<std::uint16_t>()[k];
    const float value = bf16_to_float(stored) + change;
    const RandomKey key{step.seed_low, RandomPurpose::sample, step.step};
    const std::uint32_t draw = random_word(key, 0, draws_ == "one" ? 0 : static_cast<std::uint64_t>(k));
    stored = draws_ == "nearest" ? float_to_bf16(value) : float_to_bf16_stochastic(value, draw);
  }

  static inline int launches_ = 0;
  std::int64_t left_;
  bool shared_;
  std::string draws_;
};

constexpr std::pair<const char*, UpdateLocality> kLocalities[] = {
    {"element", UpdateLocality::element}, {"row", UpdateLocality::row}, {"matrix", UpdateLocality::matrix}};
std::string kind_of(const std::string& locality) { return "ratio_update_" + locality; }

struct RatioOptions {
  std::string locality = "matrix";
  bool blocks_only = false;
  bool tail = false;
  bool beyond = false;
  bool shared = false;
  std::string masters = "refused";
};

OptionTable<RatioOptions> ratio_options() {
  OptionTable<RatioOptions> t;
  t.add("locality", &RatioOptions::locality, "what the op states").one_of({"element", "row", "matrix"});
  t.add("blocks_only", &RatioOptions::blocks_only, "AdamW outside the layers");
  t.add("tail", &RatioOptions::tail, "leaves the last element of each master as it is");
  t.add("beyond", &RatioOptions::beyond, "updates an element behind each master");
  t.add("shared", &RatioOptions::shared, "steps grow with the launches of all trainings");
  t.add("masters", &RatioOptions::masters, "how bf16 masters are rounded").one_of({"refused", "nearest", "one"});
  return t;
}

class Ratio final : public Optimizer {
 public:
  explicit Ratio(const RatioOptions& options) : options_(options) {}
  std::vector<OptimizerState> states(const ParameterSpec& parameter) const override {
    return {OptimizerState::elements(parameter, "moment1", DType::f32),
            OptimizerState::elements(parameter, "moment2", DType::f32)};
  }
  void update(UpdateBuilder& b, const ParameterSpec& parameter) const override {
    const std::vector<ValueId> inputs{b.update(), b.step(),           b.gradient(),
                                      b.master(), b.state("moment1"), b.state("moment2")};
    if (options_.blocks_only && parameter.group != ParameterGroup::block)
      b.op("adamw", inputs, "", {{"beta1", 0.9}, {"beta2", 0.95}, {"eps", 1e-8}, {"weight_decay", 0.0}});
    else
      b.op(kind_of(options_.locality), inputs, "",
           {{"tail", std::int64_t{options_.tail}},
            {"beyond", std::int64_t{options_.beyond}},
            {"shared", std::int64_t{options_.shared}},
            {"masters", options_.masters}});
  }

 private:
  RatioOptions options_;
};

}  // namespace

QUERN_PLUGIN("optimizer", "ratio", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  for (const auto& [word, locality] : kLocalities) {
    manifest.ops.push_back({.kind = kind_of(word),
                            .inputs = {"update", "step", "tensors*"},
                            .outputs = {"new_master", "new_moment1", "new_moment2"},
                            .infer =
                                [](InferContext& c) {
                                  for (std::size_t i = 0; i < c.outputs.size(); ++i) {
                                    const Value& like = *c.inputs[2 + 4 * (i / 3) + 1 + i % 3];
                                    c.outputs[i].shape = like.shape, c.outputs[i].dtype = like.dtype;
                                  }
                                },
                            .updates = {{0, 3}, {1, 4}, {2, 5}},
                            .locality = locality});
    manifest.kernels.push_back({"cpu", kind_of(word), [](const OpInstance& op) {
                                  if (op.inputs[3].dtype != DType::f32 && op.attributes.word("masters") == "refused")
                                    throw Error(ErrorCode::config, {.where = "ratio", .what = "f32 masters only"});
                                  return std::make_unique<RatioKernel>(op);
                                }});
  }
  manifest.add<Optimizer>(
      "ratio", "momentum, scaled by norms of whole matrices", ratio_options().specs(),
      [](const OptionValues& values) { return std::make_unique<Ratio>(ratio_options().bind(values)); });
}
