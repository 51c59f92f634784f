#include "llama.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kLlama = llama::family();

// Llama 3.2 1B, as transformers 5 writes it.
const std::string kLlama32 =
    R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000,
  "eos_token_id": [128001, 128008], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
  "initializer_range": 0.02,
  "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": null, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_parameters": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
  "original_max_position_embeddings": 8192,
  "rope_theta": 500000.0, "rope_type": "llama3"}, "tie_word_embeddings": true, "transformers_version": "5.0.0",
  "use_cache": true,
  "vocab_size": 128256})";
// Llama 2 7B, as first published: no rope_theta, no attention_bias, null for no scaling.
const std::string kLlama2 =
    R"({"_name_or_path": "llama", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
  "max_position_embeddings": 4096,
  "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16",
  "transformers_version": "4.31.0.dev0", "use_cache": true, "vocab_size": 32000})";

}  // namespace

TEST_CASE("every variant is a sound model") {
  for (int variant = 0; variant < 8; ++variant) {
    CAPTURE(variant);
    check_sound(*small_model(kLlama, {{"attention_bias", (variant & 1) != 0},
                                      {"mlp_bias", (variant & 2) != 0},
                                      {"tie_word_embeddings", (variant & 4) != 0}}));
  }
}

TEST_CASE("parameters are packed in Hugging Face's names and order") {
  const std::vector<ParameterSpec> list =
      small_model(kLlama, {{"head_dim", std::int64_t{16}}, {"attention_bias", true}, {"initializer_range", 0.01}})
          ->parameters();
  const ParameterSpec& qkv = parameter(list, "qkv.weight");
  CHECK(qkv.extents == Extents{(6 + 2 * 2) * 16, 48});
  REQUIRE(qkv.parts.size() == 3);
  CHECK(qkv.parts[0].hf_name == "model.layers.{layer}.self_attn.q_proj.weight");
  CHECK(qkv.parts[1].hf_name == "model.layers.{layer}.self_attn.k_proj.weight");
  CHECK(qkv.parts[2].hf_name == "model.layers.{layer}.self_attn.v_proj.weight");
  CHECK(qkv.parts[0].rows == 96);
  CHECK(qkv.parts[2].rows == 32);
  CHECK(qkv.parts[0].heads == std::vector<HeadRows>{{6, 16, 3}});
  CHECK(qkv.parts[1].heads == std::vector<HeadRows>{{2, 16, 1}});
  CHECK(qkv.parts[2].heads == qkv.parts[1].heads);
  CHECK(qkv.parts[1].init.deviation == 0.01);
  CHECK(qkv.decay);
  CHECK(parameter(list, "o.weight").extents == Extents{48, 96});
  CHECK(parameter(list, "gate_up.weight").parts[1].hf_name == "model.layers.{layer}.mlp.up_proj.weight");
  CHECK(parameter(list, "lm_head.weight").group == ParameterGroup::head);
  const ParameterSpec& bias = parameter(list, "qkv.bias");
  CHECK(bias.extents == Extents{160});
  CHECK(bias.parts[0].init.kind == Init::Kind::zeros);
  CHECK(!bias.decay);
  CHECK(parameter(list, "ffn_norm.weight").parts[0].init.kind == Init::Kind::ones);
  CHECK(!parameter(list, "final_norm.weight").decay);
}

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kLlama, kLlama32, 1235814400);
  check_published(kLlama, kLlama2, 6738415616);
  CHECK(model_from(kLlama, kLlama32)->traits().max_positions == 131072);
  CHECK(model_from(kLlama, kLlama32)->traits().width == 2048);
  const OptionValues options = values_from(kLlama, kLlama2);
  CHECK(options.get<double>("rope_theta") == 10000.0);
  CHECK(options.get<double>("rms_norm_eps") == 1e-5);
}

TEST_CASE("every field of a config.json is written and read back") {
  const std::unique_ptr<Model> model = small_model(kLlama, {{"attention_bias", true},
                                                            {"mlp_bias", true},
                                                            {"rope_scaling.rope_type", std::string("yarn")},
                                                            {"rope_scaling.factor", 4.0},
                                                            {"rope_scaling.attention_factor", 1.25}});
  const OptionValues back = values_from(kLlama, model->hf_config());
  CHECK(back.get<bool>("attention_bias"));
  CHECK(back.get<bool>("mlp_bias"));
  CHECK(back.get<std::string>("rope_scaling.rope_type") == "yarn");
  CHECK(back.get<double>("rope_scaling.attention_factor") == 1.25);
  CHECK(back.get<std::int64_t>("num_key_value_heads") == 2);
  CHECK(back.get<std::int64_t>("head_dim") == 8);
}

TEST_CASE("fields of converted models that no Llama reads are read past") {
  std::string converted = kLlama2;
  converted.insert(1, R"("sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": false, )");
  CHECK(model_from(kLlama, converted)->hf_config() == model_from(kLlama, kLlama2)->hf_config());
  check_refuses(kLlama, kLlama2, R"("use_sliding_window": true)", "quern attends to all earlier tokens");
}

TEST_CASE("sizes that do not fit are refused when the model is made") {
  CHECK_THROWS_WITH_AS(small_model(kLlama, {{"num_key_value_heads", std::int64_t{4}}}),
                       doctest::Contains("model.llama: sizes that cannot be used:\n  num_key_value_heads: found 4"),
                       Error);
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kLlama, true); }

TEST_CASE("the plugin makes a model from options") { check_plugin(kLlama); }
