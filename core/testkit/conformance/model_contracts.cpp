// Of models: parameters and programs that fit together, gradients against finite differences of the loss, a loss at
// initialisation near a guess's, and trainings that repeat and resume bit for bit. fp32 on the oracle.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>

#include <nlohmann/json.hpp>

#include "base/files/test_directory.h"
#include "conformance/contracts.h"
#include "conformance/own_ops.h"
#include "conformance/trial.h"
#include "quern/testkit/compare.h"
#include "quern/testkit/model_conformance.h"
#include "quern/testkit/tiny_model.h"
#include "transform/lora.h"

namespace quern::conformance {

namespace {

constexpr std::int64_t kLargestModel = 2'000'000;  // parameters; finite differences run it some hundred times

std::string sound_programs(const Subject& subject, const Model& model) {
  for (DType dtype : {DType::f32, DType::bf16})
    for (const std::string& fault : testkit::model_faults(model, dtype, subject.host.ops()))
      broken("in " + std::string(name_of(dtype)), fault, "parameters and programs that fit together");
  const std::int64_t count = testkit::parameter_count(model);
  need(count <= kLargestModel, "size of the configuration to check", std::to_string(count) + " parameters",
       "at most " + std::to_string(kLargestModel) + ": give smaller sizes with --set");
  return std::to_string(model.parameters().size()) + " parameter tensors, " + std::to_string(count) + " numbers";
}

/// Whether an option is the number of layers, by Hugging Face's names.
bool is_depth(const std::string& key) {
  return key == "num_hidden_layers" || key == "n_layer" || key == "num_layers" || key == "depth";
}

/// All that a model says of itself.
std::string described(const Subject& subject, const Model& model) {
  const ModelTraits traits = model.traits();
  std::string text = std::to_string(traits.vocabulary) + " " + std::to_string(traits.max_positions) + "\n";
  for (const ParameterSpec& spec : model.parameters()) {
    text += spec.name + " " + to_string(spec.extents) + (spec.decay ? " decays" : "");
    for (const ParameterPart& part : spec.parts)
      text += " " + part.hf_name + " " + std::to_string(part.rows) + " " + number(part.init.deviation);
    text += "\n";
  }
  return text + testkit::model_programs(model, subject.host.ops());
}

/// Its config.json is JSON, and the model made from it says the same of itself.
nlohmann::json read_back(const Subject& subject, const Model& model, const std::string& of) {
  const std::string text = model.hf_config();
  nlohmann::json config = nlohmann::json::parse(text, nullptr, false);
  need(config.is_object(), "hf_config()", text.substr(0, 60), "a JSON object");
  need(config.contains("model_type"), "hf_config()", "no model_type", "what a config.json of Hugging Face has");
  TestDirectory scratch;
  std::ofstream(scratch / "config.json") << text;
  OptionValues values;
  values.set("config", scratch / "config.json");
  auto again = subject.host.create<Model>(subject.factory.id, values);
  need(described(subject, *again) == described(subject, model), "the model made from the config.json of one" + of,
       "other parameters or programs", "the same");
  return config;
}

/// Whether some other value of the option changes the model.
bool has_effect(const Subject& subject, const OptionSpec& spec, const OptionValue& now) {
  try {
    const std::string plain = described(subject, *subject.make<Model>());
    for (const OptionValue& value : other_values(spec, now))
      if (described(subject, *subject.make_with<Model>(spec.key, value)) != plain) return true;
  } catch (const Error&) {  // of the contract "stated values work"
  }
  return false;
}

/// An option has an effect, at the latest in a model with many layers and another value of another option.
void need_effect(const Subject& subject, const OptionSpec& spec, const OptionValue& now) {
  Subject deep = subject;
  for (const OptionSpec& other : subject.factory.options)
    if (is_depth(other.key)) deep.values.set(other.key, std::int64_t{12});
  if (has_effect(deep, spec, now)) return;
  for (const OptionSpec& other : subject.factory.options) {
    const OptionValue* value = deep.values.find(other.key);
    if (!value || other.key == "config" || other.key == spec.key) continue;
    for (const OptionValue& changed : other_values(other, *value)) {
      Subject beside = deep;
      beside.values.set(other.key, changed);
      if (has_effect(beside, spec, now)) return;
    }
  }
  broken("option " + spec.key, "the same parameters and programs whatever its value",
         "an effect, or a refusal where the other options leave it without one");
}

/// hf_config() has every option, whatever its value, and each value makes programs that fit together.
std::string own_config(const Subject& subject, const Model& model) {
  const nlohmann::json config = read_back(subject, model, "");
  const std::string plain = described(subject, model);
  std::size_t tried = 0;
  for (const OptionSpec& spec : subject.factory.options) {
    const OptionValue* now = subject.values.find(spec.key);
    if (!now || spec.key == "config") continue;
    bool changes = false, made = false;
    for (const OptionValue& value : other_values(spec, *now)) {
      std::unique_ptr<Model> other;
      try {
        other = subject.make_with<Model>(spec.key, value);
      } catch (const Error&) {
        continue;  // of the contract "stated values work"
      }
      const std::string of = " with " + spec.key + " = " + to_string(value);
      read_back(subject, *other, of);
      changes = changes || described(subject, *other) != plain;
      const auto faults = testkit::model_faults(*other, DType::f32, subject.host.ops());
      need(faults.empty(), "a model" + of, faults.empty() ? "" : faults[0],
           "parameters and programs that fit together");
      made = true;
      ++tried;
      if (spec.type != OptionType::text) break;
    }
    if (made && !changes) need_effect(subject, spec, *now);
  }
  return "model_type " + config["model_type"].dump() + ", " + std::to_string(tried) + " other values of options";
}

PlanOptions options_for(const Model& model) {
  PlanOptions options;
  options.geometry = {3, std::min<std::int64_t>(7, model.traits().max_positions)};
  return options;
}

struct Made {
  std::unique_ptr<Device> device;
  std::unique_ptr<Model> model;
  std::unique_ptr<Trial> trial;
};

/// A trial of the model, everything in it new. `precision` outlives it.
Made fresh(const Subject& subject, const PrecisionBackend* precision = nullptr,
           const std::vector<std::string>& recompute = {}, bool documents = false,
           std::unique_ptr<Model> changed = nullptr) {
  Made made{oracle(subject.host), changed ? std::move(changed) : subject.make<Model>(), nullptr};
  PlanOptions options = options_for(*made.model);
  options.recompute = recompute;
  options.documents = documents;
  made.trial =
      std::make_unique<Trial>(subject.host, TrialParts{*made.model, *made.device, precision, nullptr}, options);
  return made;
}

Batch batch_for(Trial& trial, std::uint64_t seed) { return random_batch(trial.plan(), seed); }

const Value* input_named(const Plan& plan, std::string_view name) {
  for (const Value& input : plan.uploaded)
    if (input.name == name) return &input;
  return nullptr;
}

/// What a target is one of: tokens, or what the input's bound says; 0: not known.
std::int64_t choices_of(const Plan& plan) {
  const Value* targets = input_named(plan, "targets");
  return targets && targets->below > 0 ? targets->below : plan.model.vocabulary;
}

std::string first_loss(const Subject& subject) {
  Made made = fresh(subject);
  const double loss = made.trial->loss(batch_for(*made.trial, 3));
  const std::int64_t choices = choices_of(made.trial->plan());
  need(std::isfinite(loss), "loss at initialisation", number(loss), "a finite number");
  if (choices == 0) return number(loss);
  const double guess = std::log(static_cast<double>(choices));
  // Logits of deviation s add about s^2 / 2 to the loss of a guess; a model that starts beyond s = 1 starts badly.
  need(std::fabs(loss - guess) <= 0.5, "loss at initialisation", number(loss),
       "ln(" + std::to_string(choices) + ") = " + number(guess) + " of a guess, within 0.5");
  return number(loss) + ", a guess's is ln(" + std::to_string(choices) + ") = " + number(guess);
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * b[i];
  return sum;
}

/// Slope of the loss along `direction` at the parameter's values, by central differences.
class Slopes {
 public:
  explicit Slopes(Trial& trial) : trial_(trial), batch_(batch_for(trial, 3)) {}

  double along(const PlannedTensor& master, const std::vector<float>& values, const std::vector<float>& direction,
               double step) {
    double losses[2];
    for (int side : {0, 1}) {
      std::vector<float> moved = values;
      for (std::size_t i = 0; i < moved.size(); ++i)
        moved[i] += static_cast<float>((side ? step : -step) * direction[i]);
      trial_.write("master", master.parameter, master.layer, moved);
      losses[side] = trial_.loss_sum(batch_);
    }
    trial_.write("master", master.parameter, master.layer, values);
    largest_loss_ = std::max(losses[0], losses[1]);
    return (losses[1] - losses[0]) / (2 * step);
  }
  /// What rounding the losses to fp32 may do to the last slope.
  double noise(double step) const { return 4e-7 * largest_loss_ / step; }
  const Batch& batch() const { return batch_; }

 private:
  Trial& trial_;
  Batch batch_;
  double largest_loss_ = 0;
};

/// Along the gradient itself the slope is its norm. That does not see elements whose gradient is missing, so random
/// directions follow, along which the slope is the gradient's share.
std::string gradients_agree(const Made& made, int directions = 4) {
  Trial& trial = *made.trial;
  trial.stir();
  Slopes slopes(trial);
  const Tensors gradients = trial.gradients(slopes.batch());
  double worst = 0;
  for (const auto& [name, gradient] : gradients) {
    const std::size_t slash = name.find('/');
    const int layer = slash == std::string::npos ? -1 : std::atoi(name.c_str() + slash + 1);
    const PlannedTensor& master = trial.plan().tensor({"master", name.substr(0, slash), layer});
    const std::vector<float> values = trial.tensor("master", master.parameter, layer);
    const double norm = std::sqrt(dot(gradient, gradient));
    need(std::isfinite(norm), "gradient of " + name, "a norm of " + number(norm), "a finite one");
    for (int direction = 0; direction < directions; ++direction) {
      std::vector<float> along = gradient;
      if (direction > 0)
        along = testkit::random_normal(static_cast<std::int64_t>(values.size()), static_cast<std::uint64_t>(direction));
      const double length = std::sqrt(dot(along, along));
      if (length == 0) continue;  // a gradient of zero: the random directions look at it
      for (float& element : along) element /= static_cast<float>(length);
      // A step that moves the loss by about 0.03, yet small beside the weights.
      const double step = std::min(0.1, 0.03 / std::max(norm, 1e-3));
      const double want = slopes.along(master, values, along, step), got = dot(gradient, along);
      const double spread = direction == 0 ? norm : norm / std::sqrt(static_cast<double>(values.size()));
      const double tolerance = 0.01 * std::fabs(want) + 0.02 * spread + slopes.noise(step) + 1e-5;
      need(std::fabs(got - want) <= tolerance, "gradient of " + name + (direction ? " along a random direction" : ""),
           number(got), number(want) + " by finite differences, within " + number(tolerance));
      if (direction == 0) worst = std::max(worst, std::fabs(got - want) / norm);
    }
  }
  return std::to_string(gradients.size()) + " tensors, worst relative error " + number(worst);
}

/// The gradients of models with other values of an option, one at a time, and of one and three layers.
std::string gradients_of_variants(const Subject& subject) {
  std::size_t tried = 0;
  for (const OptionSpec& spec : subject.factory.options) {
    const OptionValue* now = subject.values.find(spec.key);
    if (!now || spec.key == "config") continue;
    std::vector<OptionValue> values = other_values(spec, *now);
    if (spec.type != OptionType::text && values.size() > 1) values.resize(1);
    if (is_depth(spec.key)) values = {OptionValue(std::int64_t{1}), OptionValue(std::int64_t{3})};
    for (const OptionValue& value : values) {
      std::unique_ptr<Model> other;
      try {
        other = subject.make_with<Model>(spec.key, value);
      } catch (const Error&) {
        continue;  // of the contract "stated values work"
      }
      try {
        gradients_agree(fresh(subject, nullptr, {}, false, std::move(other)), 2);
      } catch (const Broken& fault) {
        broken(fault.what + " with " + spec.key + " = " + to_string(value), fault.got, fault.want);
      }
      ++tried;
    }
  }
  return std::to_string(tried) + " models";
}

template <class T>
void change(std::vector<std::byte>& bytes, std::int64_t begin, std::int64_t end, const std::function<T(T)>& other) {
  auto* values = reinterpret_cast<T*>(bytes.data());
  for (std::int64_t i = begin; i < end; ++i) values[i] = other(values[i]);
}

/// Other inputs at a token: its own elements, or the ones in its row.
void change_inputs(const Plan& plan, Batch& batch, std::int64_t token) {
  const Geometry& geometry = plan.options.geometry;
  if (const auto vocabulary = static_cast<std::int32_t>(plan.model.vocabulary); vocabulary > 0) {
    std::int32_t& word = batch.tokens[static_cast<std::size_t>(token)];
    word = (word + 1) % vocabulary;
  }
  for (auto& [name, bytes] : batch.inputs) {
    const Value& input = *input_named(plan, name);
    const Extents extents = extents_at(input.shape, geometry);
    const std::int64_t size = element_count(extents) / extents[0], in_row = extents[0] / geometry.batch;
    // A row may lack some tokens that the model adds.
    const bool of_token = input.shape[0].per_token > 0;
    const std::int64_t first = of_token ? std::min(token % geometry.sequence, in_row - 1) : 0;
    const std::int64_t begin = (token / geometry.sequence * in_row + first) * size;
    const std::int64_t end = begin + (of_token ? size : in_row * size);
    if (input.dtype == DType::f32)
      change<float>(bytes, begin, end, [](float x) { return x + 1; });
    else if (input.dtype == DType::u8)
      change<std::uint8_t>(bytes, begin, end, [](std::uint8_t x) { return static_cast<std::uint8_t>(x ^ 1); });
    else
      change<std::int32_t>(bytes, begin, end,
                           [&](std::int32_t x) { return static_cast<std::int32_t>((x + 1) % input.below); });
  }
}

/// The sum of the losses of the targets that `counts` names, before and after the inputs at a token change.
void need_unseen(Trial& trial, Batch batch, std::int64_t changed, const std::function<bool(std::int64_t)>& counts,
                 const std::string& who) {
  for (std::size_t i = 0; i < batch.targets.size(); ++i)
    batch.targets[i] = counts(static_cast<std::int64_t>(i)) ? std::max(batch.targets[i], 0) : -1;
  const double want = trial.loss_sum(batch);
  change_inputs(trial.plan(), batch, changed);
  const double got = trial.loss_sum(batch);
  need(got == want, "loss of " + who, number(got) + " after the change, off by " + number(got - want),
       number(want) + ", bit for bit: they must not see it");
}

/// No loss depends on other rows; of a causal model none depends on later tokens, or on other documents of its row.
std::string causal(const Subject& subject) {
  Made made = fresh(subject);
  made.trial->stir();
  const Geometry geometry = made.trial->plan().options.geometry;
  const std::int64_t row = geometry.sequence;
  const bool is_causal = made.trial->plan().model.causal;
  const Value& targets = *input_named(made.trial->plan(), "targets");
  need(!is_causal || targets.shape[0].per_token > 0, "a model whose traits say causal", "a loss for each row",
       "one for each token; a loss of the whole row depends on its last token");
  for (std::int64_t t = 0; t < row; ++t) {
    const std::int64_t changed = row + t;  // of the second row
    Batch batch = batch_for(*made.trial, 3);
    const bool by_token = static_cast<std::int64_t>(batch.targets.size()) == geometry.tokens();
    need_unseen(
        *made.trial, std::move(batch), changed,
        [&](std::int64_t i) { return (by_token ? i / row : i) != 1 || (by_token && is_causal && i < changed); },
        "targets before and beside position " + std::to_string(t) + " when the inputs there change");
  }
  if (!is_causal) return std::to_string(row) + " positions: no other row sees them; the model is not causal";
  Made packed = fresh(subject, nullptr, {}, true);
  packed.trial->stir();
  Batch batch = batch_for(*packed.trial, 3);
  const std::int64_t second = (row + 1) / 2;
  batch.documents.clear();
  for (std::int64_t start = 0; start < geometry.tokens(); start += row) {
    batch.documents.push_back(static_cast<std::int32_t>(start));
    if (second < row) batch.documents.push_back(static_cast<std::int32_t>(start + second));
    for (std::int64_t i = second; i < row; ++i)
      batch.positions[static_cast<std::size_t>(start + i)] = static_cast<std::int32_t>(i - second);
  }
  batch.documents.push_back(static_cast<std::int32_t>(geometry.tokens()));
  need_unseen(
      *packed.trial, batch, 0, [&](std::int64_t i) { return i >= second; },
      "a second document when the first one changes");
  return std::to_string(row) + " positions, and packed documents";
}

/// Every second parameter is frozen, from the first or the second on.
class HalfFrozen final : public ModelTransform {
 public:
  HalfFrozen(std::unique_ptr<Model> model, std::size_t first) : ModelTransform(std::move(model)), first_(first) {}
  std::vector<ParameterSpec> parameters() const override {
    std::vector<ParameterSpec> specs = base().parameters();
    for (std::size_t i = first_; i < specs.size(); i += 2) specs[i].trainable = false;
    return specs;
  }

 private:
  std::size_t first_;
};

/// What trains has the gradients that it has without frozen ones beside it, and these have none.
std::string frozen(const Subject& subject) {
  Made all = fresh(subject);
  all.trial->stir();
  const Tensors want = all.trial->gradients(batch_for(*all.trial, 4));
  std::size_t compared = 0;
  for (std::size_t first : {0, 1}) {
    if (all.model->parameters().size() < 2) break;
    Made half = fresh(subject, nullptr, {}, false, std::make_unique<HalfFrozen>(subject.make<Model>(), first));
    for (const PlannedTensor& master : all.trial->plan().tensors)
      if (master.kind == "master")
        for (const char* kind : {"master", "working"})
          if (half.trial->plan().find({kind, master.parameter, master.layer}) &&
              half.trial->plan().find({kind, master.parameter, master.layer})->owner != TensorOwner::loading)
            half.trial->write(kind, master.parameter, master.layer,
                              all.trial->tensor("master", master.parameter, master.layer));
    const Tensors got = half.trial->gradients(batch_for(*half.trial, 4));
    for (const auto& [name, gradient] : got) {
      need(want.contains(name) && want.at(name) == gradient, "gradient of " + name + " beside frozen parameters",
           "other bits", "those without frozen ones");
      ++compared;
    }
    need(got.size() < want.size(), "gradients with every second parameter frozen", std::to_string(got.size()),
         "fewer than " + std::to_string(want.size()));
  }
  return std::to_string(compared) + " tensors";
}

/// LoRA of all linears of the layers.
std::string adapts(const Subject& subject) {
  OpSet ops = builtin_ops();
  for (const OpSpec& spec : subject.host.ops()) ops.add(spec);
  std::unique_ptr<Model> adapted;
  try {
    adapted = std::make_unique<LoraModel>(subject.make<Model>(), ops, LoraOptions{.rank = 2, .targets = {kAllLinear}});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::config) throw;
    return std::string("refused: ") + error.what();
  }
  return gradients_agree(fresh(subject, nullptr, {}, false, std::move(adapted)));
}

std::string repeats(const Subject& subject) {
  Made one = fresh(subject), two = fresh(subject), less = fresh(subject, nullptr, {"block"});
  const Tensors want = one.trial->gradients(batch_for(*one.trial, 4));
  for (auto& [other, how] : {std::pair{&two, "a second run"}, {&less, "recomputing the block"}}) {
    const std::string difference = first_difference(other->trial->gradients(batch_for(*other->trial, 4)), want);
    need(difference.empty(), "gradient of " + difference + " after " + how, "other bits", "the same");
  }
  return "a second run and recomputation change no bit";
}

/// States of the model are moved by steps alone, and stay finite.
std::string states(const Subject& subject) {
  Made made = fresh(subject);
  Trial& trial = *made.trial;
  std::vector<PlannedTensor> found;
  for (const PlannedTensor& tensor : trial.plan().tensors)
    if (tensor.owner == TensorOwner::precision) found.push_back(tensor);  // in fp32 all such states are the model's
  if (found.empty()) return "none";
  auto values = [&] {
    std::vector<std::vector<float>> all;
    for (const PlannedTensor& tensor : found) all.push_back(trial.tensor(tensor.kind, tensor.parameter, tensor.layer));
    return all;
  };
  const auto before = values();
  trial.loss(batch_for(trial, 3));
  need(values() == before, "states after an evaluation", "changed", "as before");
  trial.gradients(batch_for(trial, 3));
  need(values() == before, "states after a micro-batch, before the step's update", "changed", "as before");
  for (std::uint32_t step = 0; step < 50; ++step) {
    trial.train(step, step + 1);
    const auto now = values();
    for (std::size_t i = 0; i < now.size(); ++i) {
      const std::string what =
          "state " + found[i].kind + tensor_name(found[i]) + " after " + std::to_string(step + 1) + " steps";
      for (float value : now[i]) need(std::isfinite(value), what, number(value), "finite numbers");
      need(step != 4 || now[i] != before[i], what, "as at the start", "moved");
    }
  }
  return std::to_string(found.size()) + ", finite over 50 steps";
}

std::string trains_in_bf16(const Subject& subject) {
  const testkit::PlainPrecision bf16(DType::bf16);
  Made narrow = fresh(subject, &bf16), wide = fresh(subject);
  const double got = narrow.trial->loss(batch_for(*narrow.trial, 3)),
               want = wide.trial->loss(batch_for(*wide.trial, 3));
  // bf16 keeps 8 bits: logits of order one carry 2^-8 a rounding, and the mean of their errors is smaller.
  need(std::fabs(got - want) <= 0.02 * want, "loss in bf16", number(got), number(want) + " within 2 %");
  return number(got) + ", fp32 " + number(want);
}

std::string model_resumes(const Subject& subject) {
  std::vector<Made> made;  // models and devices outlive their trials
  made.reserve(4);
  return resumes([&] {
    made.push_back(fresh(subject));
    return std::move(made.back().trial);
  });
}

}  // namespace

void check_model(Report& report, const Subject& subject) {
  std::unique_ptr<Model> model = subject.make<Model>();
  if (!report.needed("parameters and shapes", [&] { return sound_programs(subject, *model); })) return;
  report.contract("config.json", [&] { return own_config(subject, *model); });
  report.contract("loss at initialisation", [&] { return first_loss(subject); });
  report.contract("gradients", [&] { return gradients_agree(fresh(subject)); });
  report.contract("gradients of variants", [&] { return gradients_of_variants(subject); });
  report.contract("frozen parameters", [&] { return frozen(subject); });
  report.contract("adapters", [&] { return adapts(subject); });
  if (!subject.host.ops().empty())
    for (DType dtype : {DType::f32, DType::bf16})
      report.contract("own ops in " + std::string(name_of(dtype)), [&] {
        const testkit::PlainPrecision precision(dtype);
        return check_own_ops(subject, fresh(subject, &precision).trial->plan());
      });
  report.contract("causal", [&] { return causal(subject); });
  report.contract("determinism", [&] { return repeats(subject); });
  report.contract("states", [&] { return states(subject); });
  report.contract("bf16", [&] { return trains_in_bf16(subject); });
  report.contract("save and restore", [&] { return model_resumes(subject); });
}

}  // namespace quern::conformance
