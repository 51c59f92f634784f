// A model's config.json: it has every option, and the model made from it is the same.
#include <fstream>

#include <nlohmann/json.hpp>

#include "base/files/test_directory.h"
#include "conformance/model/model_contracts.h"
#include "conformance/model/model_trial.h"
#include "quern/testkit/model_conformance.h"

namespace quern::conformance {

namespace {

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

}  // namespace

std::string check_own_config(const Subject& subject, const Model& model) {
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

}  // namespace quern::conformance
