#include "quern/hf_config.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <map>
#include <optional>
#include <system_error>

#include <nlohmann/json.hpp>

#include "base/files/strict_json.h"
#include "base/shorten.h"
#include "hf/ignored_keys.h"
#include "quern/error.h"

namespace quern {

namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // real files have 1 to 3 KiB
constexpr int kMostNesting = 8;
constexpr std::size_t kMostProblems = 50;
constexpr const char* kNext = "correct the file, or choose a model that quern trains";

const std::vector<HfNeutral>& general_neutral() {
  static const std::vector<HfNeutral> list = {
      {.key = "architectures"},
      {.key = "transformers_version"},
      {.key = "torch_dtype"},
      {.key = "dtype"},
      {.key = "use_cache"},
      {.key = "bos_token_id"},
      {.key = "eos_token_id"},
      {.key = "pad_token_id"},
      {.key = "_name_or_path"},
      {.key = "attn_implementation"},
      {.key = "_attn_implementation_autoset"},
      {.key = "attention_dropout", .accepted = {0.0}, .because = "quern does not apply dropout"},
      {.key = "pretraining_tp"},  // in how many parts matmuls were added up: 2 in Llama 2 13B
      {.key = "is_causal", .accepted = {true}, .because = "quern attends to earlier tokens only"},
      {.key = "activation", .accepted = {std::string("swiglu"), std::string("silu")}, .because = "of hidden_act"},
      {.key = "rope_scaling.finetuned"},  // whether the model was trained with it
      {.key = "layer_types",
       .accepted = {std::string("full_attention")},
       .because = "quern attends to all earlier tokens"},
      {.key = "partial_rotary_factor", .accepted = {1.0}, .because = "quern rotates whole heads"},
      {.key = "rope_scaling.truncate",
       .accepted = {true},
       .because = "quern's yarn ramp starts and ends at whole pairs"},
  };
  return list;
}

// Beginnings of words that name a part of the model or how it computes. Any other name is bookkeeping: settings of
// generation and of the library, labels, what a mirror or an older library noted.
constexpr std::array<std::string_view, 80> kModelWords{
    "act",     "adapter",  "alibi",    "attention", "attn",   "audio",  "auto_map", "bias",   "block", "causal",
    "clip",    "compress", "conv",     "cross",     "depth",  "dim",    "drop",     "embd",   "embed", "eps",
    "expan",   "expert",   "ffn",      "feed",      "gate",   "gating", "gelu",     "glu",    "head",  "hidden",
    "image",   "index",    "inter",    "key",       "kv",     "latent", "layer",    "linear", "logit", "lora",
    "mamba",   "mixer",    "mixture",  "mlp",       "moe",    "mscale", "mtp",      "mult",   "mup",   "nextn",
    "norm",    "offset",   "parallel", "patch",     "pdrop",  "posi",   "qk",       "quant",  "query", "recurrent",
    "relu",    "residual", "rms",      "rope",      "rotary", "router", "scal",     "shared", "silu",  "sink",
    "sliding", "softcap",  "sparse",   "ssm",       "state",  "theta",  "tie",      "vision", "vocab", "window"};
// Names of bookkeeping that have such words, or begin like this.
constexpr std::array<std::string_view, 13> kBookkeeping{"_",
                                                        "cache_implementation",
                                                        "finetuning_",
                                                        "gradient_",
                                                        "keys_to_",
                                                        "num_beam",
                                                        "num_logits_to_keep",
                                                        "output_",
                                                        "return_",
                                                        "tokenizer_",
                                                        "transformers",
                                                        "unsloth",
                                                        "use_flash"};

bool is_off(const json& value) {
  return value == json(false) || (value.is_number() && value == 0) || (value.is_string() && value == "") ||
         ((value.is_array() || value.is_object()) && value.empty());
}

/// Whether a field that nothing here knows could change the model.
bool may_matter(const std::string& name, const json& value) {
  auto begins = [](std::string_view text) { return [text](std::string_view word) { return text.starts_with(word); }; };
  if (is_off(value) || std::any_of(kBookkeeping.begin(), kBookkeeping.end(), begins(name))) return false;
  for (std::string_view rest = name;;) {
    if (std::any_of(kModelWords.begin(), kModelWords.end(), begins(rest))) return true;
    const std::size_t end = rest.find_first_of("_.-");
    if (end == rest.npos) return false;
    rest.remove_prefix(end + 1);
  }
}

std::string shown(const json& value) {
  constexpr std::size_t kMostShown = 60;
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return text.size() <= kMostShown ? text : text.substr(0, kMostShown) + "...";
}

std::optional<OptionValue> to_option(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) return value.get<double>();
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return std::nullopt;
  auto all = [&value](auto&& test) { return std::all_of(value.begin(), value.end(), test); };
  if (all([](const json& item) { return item.is_string(); })) return value.get<std::vector<std::string>>();
  if (all([](const json& item) { return item.is_number(); })) return value.get<std::vector<double>>();
  return std::nullopt;
}

bool is_accepted(const HfNeutral& neutral, const json& value) {
  if (neutral.accepted.empty()) return true;
  if (value.is_array())
    return std::all_of(value.begin(), value.end(), [&](const json& item) { return is_accepted(neutral, item); });
  std::optional<OptionValue> option = to_option(value);
  if (!option) return false;
  if (const auto* integer = std::get_if<std::int64_t>(&*option)) option = static_cast<double>(*integer);
  return std::find(neutral.accepted.begin(), neutral.accepted.end(), *option) != neutral.accepted.end();
}

// transformers 4 has rope_scaling beside rope_theta and once called its type "type"; 5 has one table, rope_parameters,
// or one for each kind of layer in it.
std::string canonical(std::string key) {
  constexpr std::string_view kNew = "rope_parameters.", kOld = "rope_scaling.";
  if (key.starts_with(kNew)) key.replace(0, kNew.size(), kOld);
  constexpr std::string_view kFull = "rope_scaling.full_attention.";
  if (key.starts_with(kFull)) key.replace(0, kFull.size(), kOld);
  if (key == "rope_scaling.sliding_attention.rope_theta") return "rope_local_base_freq";
  if (key == "rope_scaling.rope_theta") return "rope_theta";
  if (key == "rope_scaling.partial_rotary_factor") return "partial_rotary_factor";
  if (key == "rope_scaling.type") return "rope_scaling.rope_type";
  return key;
}

class Reader {
 public:
  Reader(const std::string& where, const HfModel& model) : where_(where), model_(model) {}

  OptionValues read(std::string_view text) {
    const json root = parse_strict_json(where_, text, kMostNesting);
    if (!root.is_object()) refuse_file("not a JSON object");
    flatten(root, "");
    check_model_type();
    for (const auto& [key, field] : fields_) take(key, field);
    report();
    return std::move(values_);
  }

 private:
  struct Field {
    std::string written;  // the key as the file has it
    json value;
  };

  void flatten(const json& object, const std::string& prefix) {
    for (const auto& [name, value] : object.items()) {
      const std::string written = prefix + shortened(name);
      if (value.is_null()) continue;
      if (value.is_object() && (written == "rope_scaling" || written == "rope_parameters" ||
                                written.starts_with("rope_parameters.") || nests(written))) {
        flatten(value, written + ".");
        continue;
      }
      auto [it, is_new] = fields_.try_emplace(canonical(written), Field{written, value});
      if (!is_new && it->second.value != value)
        problems_.push_back(written + ": found " + shown(value) + ", but " + it->second.written + " is " +
                            shown(it->second.value));
    }
  }

  bool nests(const std::string& key) const {
    auto below = [&key](const OptionSpec& spec) { return spec.key.starts_with(key + "."); };
    return std::any_of(model_.options.begin(), model_.options.end(), below);
  }

  void check_model_type() {
    auto node = fields_.extract("model_type");
    if (node.empty())
      problems_.push_back("model_type: missing, expected \"" + model_.model_type + "\"");
    else if (node.mapped().value != model_.model_type)
      problems_.push_back("model_type: found " + shown(node.mapped().value) + ", expected \"" + model_.model_type +
                          "\"; choose the model plugin of that type");
  }

  void take(const std::string& key, const Field& field) {
    const std::string found = field.written + ": found " + shown(field.value);
    auto has_key = [&key](const auto& entry) { return entry.key == key; };
    if (auto spec = std::find_if(model_.options.begin(), model_.options.end(), has_key); spec != model_.options.end()) {
      std::optional<OptionValue> value = to_option(field.value);
      if (!value) return problems_.push_back(found + ", expected " + describe_expected(*spec));
      if (auto bad = check_option(*spec, *value)) return problems_.push_back(field.written + ": " + *bad);
      return values_.set(key, *value);
    }
    for (const auto* list : {&model_.neutral, &general_neutral()}) {
      auto neutral = std::find_if(list->begin(), list->end(), has_key);
      if (neutral == list->end()) continue;
      if (!is_accepted(*neutral, field.value))
        problems_.push_back(found + ", expected " + accepted_text(*neutral) + ": " + neutral->because);
      return;
    }
    std::vector<std::string> options;
    for (const OptionSpec& spec : model_.options) options.push_back(spec.key);
    if (!may_matter(key, field.value) && nearest_name(key, options).empty()) return;
    std::string near = nearest_name(key, known());
    problems_.push_back(found + ", which " + model_.model_type + " in quern does not honour" +
                        (near.empty() ? "" : "; nearest name `" + near + "`"));
  }

  static std::string accepted_text(const HfNeutral& neutral) {
    std::string text;
    for (const OptionValue& value : neutral.accepted) {
      const auto* real = std::get_if<double>(&value);
      text += (text.empty() ? "" : " or ") + (real ? json(static_cast<std::int64_t>(*real)).dump() : to_string(value));
    }
    return text;
  }

  std::vector<std::string> known() const {
    std::vector<std::string> names;
    for (const OptionSpec& spec : model_.options) names.push_back(spec.key);
    for (const auto* list : {&model_.neutral, &general_neutral()})
      for (const HfNeutral& neutral : *list) names.push_back(neutral.key);
    return names;
  }

  [[noreturn]] void refuse_file(const std::string& what) const {
    throw Error(ErrorCode::input, {.where = where_,
                                   .what = what,
                                   .expected = "a Hugging Face config.json",
                                   .next = "download the file again, or correct it"});
  }

  void report() const {
    if (problems_.empty()) return;
    std::string what = problems_[0];
    if (problems_.size() > 1) {
      what = std::to_string(problems_.size()) + " fields cannot be used:";
      for (std::size_t i = 0; i < std::min(problems_.size(), kMostProblems); ++i) what += "\n  " + problems_[i];
      if (problems_.size() > kMostProblems)
        what += "\n  and " + std::to_string(problems_.size() - kMostProblems) + " more";
    }
    throw Error(ErrorCode::input, {.where = where_, .what = what, .next = kNext});
  }

  const std::string& where_;
  const HfModel& model_;
  std::map<std::string, Field> fields_;  // by canonical key
  std::vector<std::string> problems_;
  OptionValues values_;
};

}  // namespace

OptionValues parse_hf_config(std::string_view text, const std::string& where, const HfModel& model) {
  return Reader(where, model).read(text);
}

namespace {

/// The text of a config.json, or of that in a folder, and the file's path.
std::pair<std::string, std::string> config_text(const fs::path& path) {
  std::error_code ignored;
  const fs::path file = fs::is_directory(path, ignored) ? path / "config.json" : path;
  auto refuse = [&file](const std::string& what) {
    throw Error(ErrorCode::input, {.where = file.string(),
                                   .what = what,
                                   .expected = "a Hugging Face config.json, or the folder that has it",
                                   .next = "correct model.config"});
  };
  std::error_code why;
  const fs::file_type type = fs::status(file, why).type();
  if (type == fs::file_type::not_found) refuse("no such file");
  if (type == fs::file_type::none) refuse("cannot be read: " + why.message());
  if (type != fs::file_type::regular) refuse("not a regular file");
  std::ifstream stream(file, std::ios::binary);
  if (!stream) refuse("cannot be read: " + std::generic_category().message(errno));
  std::string text(kMostBytes + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (stream.bad()) refuse("cannot be read");
  text.resize(static_cast<std::size_t>(stream.gcount()));
  if (text.size() > kMostBytes) refuse("larger than 1 MiB");
  return {std::move(text), file.string()};
}

}  // namespace

OptionValues read_hf_config(const fs::path& path, const HfModel& model) {
  const auto [text, file] = config_text(path);
  return parse_hf_config(text, file, model);
}

std::vector<std::string> ignored_hf_keys(const fs::path& path, std::string_view honoured) {
  const auto [text, file] = config_text(path);
  const json given = parse_strict_json(file, text, kMostNesting), model = json::parse(honoured, nullptr, false);
  std::vector<std::string> keys;
  for (const auto& [key, value] : given.items()) {
    auto is_key = [&name = key](const HfNeutral& neutral) { return neutral.key == name; };
    const std::vector<HfNeutral>& known = general_neutral();
    const bool routine = std::any_of(known.begin(), known.end(), is_key) || key == "rope_parameters";
    if (!routine && !value.is_null() && !(model.is_object() && model.contains(key))) keys.push_back(shortened(key));
  }
  return keys;
}

OptionValues model_options(const OptionValues& given, const HfModel& model) {
  OptionValues values = default_values(model.options);
  const OptionValue* config = given.find("config");
  const std::string path = config ? std::get<std::string>(*config) : "";
  if (!path.empty()) {
    const OptionValues file = read_hf_config(path, model);
    for (const auto& [key, value] : file.all()) values.set(key, value);
  }
  std::string problems;
  for (const OptionSpec& spec : model.options) {
    if (const OptionValue* found = given.find(spec.key)) {
      OptionValue value = *found;
      if (auto bad = check_option(spec, value)) problems += "\n  " + spec.key + ": " + *bad;
      values.set(spec.key, std::move(value));
    } else if (!values.find(spec.key)) {
      problems += "\n  " + spec.key + ": missing, expected " + describe_expected(spec);
    }
  }
  if (problems.empty()) return values;
  throw Error(ErrorCode::config, {.where = "model." + model.model_type,
                                  .what = "options that cannot be used:" + problems,
                                  .next = path.empty() ? "set them there, or name a config.json in model.config"
                                                       : "set them there, or in " + path});
}

std::string write_hf_config(const HfModel& model, const OptionValues& fields) {
  json root = {{"architectures", {model.architecture}},
               {"model_type", model.model_type},
               {"bos_token_id", nullptr},
               {"eos_token_id", nullptr},
               {"pad_token_id", nullptr}};
  for (const auto& [key, value] : fields.all()) {
    json* place = &root;
    std::size_t start = 0;
    for (std::size_t dot; (dot = key.find('.', start)) != std::string::npos; start = dot + 1)
      place = &(*place)[key.substr(start, dot - start)];
    json& field = (*place)[key.substr(start)];
    std::visit([&field](const auto& typed) { field = typed; }, value);
    const auto* list = std::get_if<std::vector<double>>(&value);
    if (list && std::all_of(list->begin(), list->end(), [](double item) { return item == std::floor(item); }))
      field = std::vector<std::int64_t>(list->begin(), list->end());  // transformers takes no floats for whole numbers
    const auto& nulls = model.null_when_off;
    if (is_off(field) && std::find(nulls.begin(), nulls.end(), key) != nulls.end()) field = nullptr;
  }
  return root.dump(2) + "\n";
}

}  // namespace quern
