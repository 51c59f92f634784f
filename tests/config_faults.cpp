// Faults of the run's TOML and of a model's config.json.
#include <filesystem>

#include "faults.h"

namespace quern::testing {

namespace {

using Arguments = std::vector<std::string>;

// run.toml with `text` instead.
std::function<Arguments(const TinyFiles&)> toml(const std::string& text) {
  return [text](const TinyFiles& files) -> Arguments {
    write_text(files.config(), text);
    return {"train", files.config()};
  };
}

std::function<Arguments(const TinyFiles&)> set(const Overrides& overrides) {
  return [overrides](const TinyFiles& files) { return train_arguments(files, overrides); };
}

// The tiny model's config.json after `change` had its way with it, and a run on it.
std::function<Arguments(const TinyFiles&)> config_json(const std::function<void(nlohmann::json&)>& change) {
  return [change](const TinyFiles& files) -> Arguments {
    nlohmann::json config = {{"model_type", "llama"},    {"vocab_size", 64},
                             {"hidden_size", 32},        {"intermediate_size", 48},
                             {"num_hidden_layers", 2},   {"num_attention_heads", 4},
                             {"num_key_value_heads", 2}, {"max_position_embeddings", 32}};
    change(config);
    write_text(files.at("config.json"), config.is_string() ? config.get<std::string>() : config.dump(2));
    write_text(files.config(), "[model]\nid = \"llama\"\nconfig = \"" + files.at("config.json") +
                                   "\"\n[data.tokens]\ntrain = \"" + files.at("train.tok") +
                                   "\"\n[train]\nsteps = 1\nmicro_batch = 2\nsequence = 16\n[log]\ndirectory = \"" +
                                   files.at("run") + "\"\n");
    return {"train", files.config()};
  };
}

std::function<Arguments(const TinyFiles&)> with_field(const std::string& key, const nlohmann::json& value) {
  return config_json([=](nlohmann::json& config) { config[key] = value; });
}

}  // namespace

std::vector<Fault> config_faults() {
  std::string nested;
  for (int i = 0; i < 20; ++i) nested += "a.";
  return {
      {"no such file",
       3,
       {"none.toml", "cannot be read", "expected a readable TOML file", "check the path"},
       [](const TinyFiles& files) -> Arguments {
         return {"train", files.at("none.toml")};
       }},
      {"bad syntax", 2, {"run.toml:2:", "not valid TOML"}, toml("[train]\nsteps = \n")},
      {"unknown section", 2, {"run.toml:1:2: trian", "expected one of", "nearest name `train`"}, toml("[trian]\n")},
      {"unknown key, wrong type, out of range and conflicts, all reported together",
       2,
       {"errors in the config", "run.toml:2:1: train.stepz: unknown key", "nearest name `steps`",
        "run.toml:3:1: train.micro_batch: out of range, found 0, expected an integer from 1 to 16777216",
        "run.toml:4:1: train.seed: wrong type, found \"x\"",
        "run.toml:5:2: parallel.communicator: found \"none\" with 2 ranks",
        "run.toml:8:1: optimizer.master: not a choice, found \"fp9\"", "run.toml:10:1: memory.recompute: unknown"},
       toml("[train]\nstepz = 3\nmicro_batch = 0\nseed = \"x\"\n[parallel]\nranks = 2\n[optimizer]\nmaster = \"fp9\"\n"
            "[memory]\nrecompute = [\"blok\"]\n")},
      {"unknown plugin",
       2,
       {"model.id: no such model plugin", "found \"lama\"", "nearest name `llama`"},
       set({"model.id=lama"})},
      {"nested too deeply",
       2,
       {"run.toml:1:", "nested too deeply", "found more than 16", "expected fewer"},
       toml(nested + "a = 1\n")},
      {"over 1 MiB", 2, {"run.toml", "too large for a config", "1048576"}, toml(std::string((1 << 20) + 1, '#'))},
      {"an override that is no assignment",
       2,
       {"--set", "found \"train.steps\"", "expected section.key=value"},
       set({"train.steps"})},
      {"a sequence longer than the model's positions",
       2,
       {"train.sequence", "found 64, expected at most 32", "shorten it"},
       set({"train.sequence=64"})},
      {"a size that is none", 2, {"memory.device_budget", "found \"lots\"", "GiB"}, set({"memory.device_budget=lots"})},
  };
}

std::vector<Fault> model_config_faults() {
  using nlohmann::json;
  return {
      {"no such file",
       3,
       {"config.json: no such file", "expected a Hugging Face config.json"},
       [](const TinyFiles& files) {
         Arguments arguments = config_json([](json&) {})(files);
         std::filesystem::remove(files.at("config.json"));
         return arguments;
       }},
      {"not JSON", 3, {"config.json: not valid JSON", "line 1", "damaged"}, config_json([](json& config) {
         config = "{\"model_type\": \"llama\",";
       })},
      {"nested too deeply",
       3,
       {"config.json", "nested too deep: found more than 8 levels"},
       config_json([](json& config) { config = "{\"a\": " + std::string(100, '['); })},
      {"of another kind of model",
       3,
       {"config.json", "model_type: found \"mamba\", expected \"llama\"", "choose"},
       with_field("model_type", "mamba")},
      {"a field that quern does not honour",
       3,
       {"config.json", "hiden_size: found 32", "nearest name `hidden_size`"},
       with_field("hiden_size", 32)},
      {"a size of zero",
       3,
       {"config.json", "num_hidden_layers: out of range, found 0, expected an integer from 1"},
       with_field("num_hidden_layers", 0)},
      {"heads that do not divide the width",
       2,
       {"run.toml:2:1: model.id", "hidden_size: found 34, expected a multiple of num_attention_heads, which is 4",
        "config.json"},
       with_field("hidden_size", 34)},
      {"key heads that do not divide the query heads",
       2,
       {"run.toml:2:1: model.id", "num_key_value_heads: found 3, expected a divisor", "config.json"},
       with_field("num_key_value_heads", 3)},
      {"unknown rope type",
       3,
       {"config.json", "rope_scaling.rope_type: not a choice, found \"spiral\"", "\"yarn\""},
       with_field("rope_scaling", {{"rope_type", "spiral"}, {"factor", 2}})},
      {"several at once",
       3,
       {"config.json", "3 fields cannot be used", "hidden_act", "vocab_size", "attention_dropout"},
       config_json([](json& config) {
         config.update({{"hidden_act", "gelu"}, {"vocab_size", "many"}, {"attention_dropout", 0.1}});
       })},
  };
}

}  // namespace quern::testing
