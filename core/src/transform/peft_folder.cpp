#include "transform/peft_folder.h"

#include <cmath>
#include <filesystem>
#include <set>

#include <nlohmann/json.hpp>

#include "base/files/durable_file.h"
#include "base/files/input_file.h"
#include "base/shorten.h"
#include "quern/error.h"

namespace quern {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

constexpr const char* kConfig = "adapter_config.json";

std::string config_text(const PeftConfig& config, const LoraModel& model) {
  ordered_json json;
  json["peft_type"] = "LORA";
  json["task_type"] = "CAUSAL_LM";
  json["base_model_name_or_path"] = config.base.empty() ? ordered_json() : ordered_json(config.base);
  json["r"] = config.rank;
  json["lora_alpha"] = config.alpha;
  if (config.alpha == std::floor(config.alpha)) json["lora_alpha"] = static_cast<std::int64_t>(config.alpha);
  json["lora_dropout"] = config.dropout;
  if (config.rslora) json["use_rslora"] = true;  // older versions do not know it
  json["target_modules"] = model.target_modules();
  json["fan_in_fan_out"] = model.targets_are_transposed();
  json["bias"] = "none";
  json["inference_mode"] = true;
  json["init_lora_weights"] = true;
  for (const char* key : {"layers_to_transform", "layers_pattern", "modules_to_save", "auto_mapping", "revision"})
    json[key] = nullptr;
  for (const char* key : {"rank_pattern", "alpha_pattern"}) json[key] = ordered_json::object();
  return json.dump(2) + "\n";
}

// Fields of adapter_config.json that the model does not depend on, or whose values are checked one by one. Any other
// must be off: newer versions of PEFT add kinds of LoRA as fields.
const std::set<std::string> kKnown{"peft_type",
                                   "task_type",
                                   "base_model_name_or_path",
                                   "r",
                                   "lora_alpha",
                                   "lora_dropout",
                                   "use_rslora",
                                   "target_modules",
                                   "exclude_modules",
                                   "fan_in_fan_out",
                                   "inference_mode",
                                   "auto_mapping",
                                   "init_lora_weights",
                                   "revision",
                                   "peft_version",
                                   "layers_pattern",
                                   "megatron_core",
                                   "megatron_config",
                                   "loftq_config",
                                   "eva_config",
                                   "corda_config",
                                   "lora_ga_config",
                                   "qalora_group_size",
                                   "ensure_weight_tying"};

/// Whether the adapter began beside the base model's own weights: others (PiSSA, OLoRA) take a part out of them.
bool keeps_base(const nlohmann::json& init) {
  return init.is_null() || init.is_boolean() || init == "gaussian" || init == "eva" || init == "orthogonal";
}

/// null, false, 0, "none" or empty.
bool is_off(const nlohmann::json& value) {
  if (value.is_string()) return value == "none" || value == "";
  if (value.is_number()) return value == 0;
  return value.is_null() || value == false || ((value.is_array() || value.is_object()) && value.empty());
}

}  // namespace

void check_peft_folder(const std::string& directory, const PeftConfig& config) {
  const std::string path = (fs::path(directory) / kConfig).string();
  const nlohmann::json json = nlohmann::json::parse(InputFile(path).text(), nullptr, false);
  auto refuse = [&](const std::string& what, const std::string& found, const std::string& expected) {
    throw Error(ErrorCode::input, {.where = path, .what = what, .found = shortened(found), .expected = expected});
  };
  if (!json.is_object()) refuse("no adapter's config", "no JSON object", "adapter_config.json as PEFT writes it");
  auto value = [&](const char* key) { return json.contains(key) ? json[key] : nlohmann::json(); };
  if (value("peft_type") != "LORA") refuse("kind of adapter", value("peft_type").dump(), "LORA");
  if (value("r") != config.rank) refuse("r", value("r").dump(), std::to_string(config.rank) + ", as adapter.rank");
  if (!value("lora_alpha").is_number() || value("lora_alpha").get<double>() != config.alpha)
    refuse("lora_alpha", value("lora_alpha").dump(), nlohmann::json(config.alpha).dump() + ", as adapter.alpha");
  if ((value("use_rslora") == true) != config.rslora)
    refuse("use_rslora", value("use_rslora").dump(),
           std::string(config.rslora ? "true" : "false") + ", as adapter.rslora");
  if (!keeps_base(value("init_lora_weights")))
    refuse("init_lora_weights", value("init_lora_weights").dump(), "true, false, gaussian, eva or orthogonal");
  for (const auto& [key, setting] : json.items())
    if (!kKnown.contains(key) && !is_off(setting)) refuse(shortened(key) + " is not supported", setting.dump(), "none");
}

void write_peft_folder(const std::string& directory, const PeftConfig& config, const LoraModel& model, DType dtype,
                       const WeightReader& reader) {
  std::vector<ParameterSpec> specs;
  for (const LoraTarget& target : model.targets()) {
    specs.push_back(target.a);
    specs.push_back(target.b);
  }
  fs::path target = fs::path(directory).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();  // "out/" names out
  check_replaceable(target, kPeftWeights);
  if (target.has_parent_path()) make_directories(target.parent_path());
  write_directory(target, [&](const std::string& temporary) {
    write_hf_weights(temporary + "/" + kPeftWeights, dtype, specs, model.traits().layers, reader);
    DurableFile file(temporary + "/" + kConfig);
    file.write(config_text(config, model));
    file.commit();
  });
}

}  // namespace quern
