#include "transform/train_groups.h"

#include <algorithm>
#include <utility>

#include "base/shorten.h"
#include "hf/hf_weights.h"
#include "quern/error.h"
#include "transform/model_transform.h"
#include "transform/name_pattern.h"

namespace quern {

namespace {

class Grouped final : public ModelTransform {
 public:
  Grouped(std::unique_ptr<Model> model, std::vector<ParameterSpec> parameters)
      : ModelTransform(std::move(model)), parameters_(std::move(parameters)) {}
  std::vector<ParameterSpec> parameters() const override { return parameters_; }

 private:
  std::vector<ParameterSpec> parameters_;
};

/// Names of the tensors that a parameter holds, over all layers.
std::vector<std::string> tensor_names(const ParameterSpec& spec, std::int64_t layers) {
  std::vector<std::string> names;
  const std::int64_t count = spec.group == ParameterGroup::block ? layers : 1;
  for (std::int64_t layer = 0; layer < count; ++layer)
    for (const ParameterPart& part : spec.parts) names.push_back(hf_tensor_name(part, layer));
  return names;
}

/// The patterns of a rule, and which of them matched anything yet.
class Matcher {
 public:
  explicit Matcher(const TrainRule& rule) : rule_(rule), used_(rule.match.size(), false) {}

  bool takes(const ParameterSpec& spec, std::int64_t layers) {
    if (any(spec.name)) return true;
    const std::vector<std::string> names = tensor_names(spec, layers);
    std::vector<std::string> in, out;
    for (const std::string& name : names) (any(name) ? in : out).push_back(name);
    if (!in.empty() && !out.empty())
      throw Error(ErrorCode::config, {.where = rule_.where,
                                      .what = "matches a part of `" + spec.name + "`, which trains as a whole",
                                      .found = in.front() + " and not " + out.front(),
                                      .expected = "all of its tensors in all layers, or none",
                                      .next = "name it \"" + spec.name + "\""});
    return !in.empty();
  }

  void need_all_used(const std::vector<ParameterSpec>& specs) const {
    std::vector<std::string> names;
    for (const ParameterSpec& spec : specs) names.push_back(spec.name);
    for (std::size_t i = 0; i < used_.size(); ++i)
      if (!used_[i])
        throw Error(ErrorCode::config, {.where = rule_.where,
                                        .what = "the model has no parameter that matches",
                                        .found = shortened(rule_.match[i]),
                                        .expected = "a name among " + names_text(names) + ", or of its tensors"});
  }

 private:
  static std::string names_text(const std::vector<std::string>& names) {
    constexpr std::size_t kMost = 12;
    std::string text;
    for (std::size_t i = 0; i < std::min(names.size(), kMost); ++i) text += (i > 0 ? ", " : "") + names[i];
    return text + (names.size() > kMost ? ", ..." : "");
  }

  bool any(const std::string& name) {
    bool found = false;
    for (std::size_t i = 0; i < used_.size(); ++i)
      if (matches(rule_.match[i], name)) used_[i] = found = true;
    return found;
  }

  const TrainRule& rule_;
  std::vector<bool> used_;
};

}  // namespace

std::unique_ptr<Model> with_rules(std::unique_ptr<Model> model, const std::vector<TrainRule>& rules) {
  if (rules.empty()) return model;
  std::vector<ParameterSpec> specs = model->parameters();
  const std::int64_t layers = model->traits().layers;
  for (const TrainRule& rule : rules) {
    Matcher matcher(rule);
    for (ParameterSpec& spec : specs) {
      if (!matcher.takes(spec, layers)) continue;
      spec.trainable = rule.trainable.value_or(spec.trainable);
      spec.rate = rule.rate.value_or(spec.rate);
      spec.decay = rule.decay.value_or(spec.decay);
      spec.optimizer = rule.optimizer.value_or(spec.optimizer);
      for (ParameterPart& part : spec.parts)
        if (rule.deviation && part.init.kind == Init::Kind::normal)
          part.init = *rule.deviation > 0 ? Init{.deviation = *rule.deviation} : Init{.kind = Init::Kind::zeros};
    }
    matcher.need_all_used(specs);
  }
  return std::make_unique<Grouped>(std::move(model), std::move(specs));
}

}  // namespace quern
