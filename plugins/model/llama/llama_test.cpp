#include "llama.h"

#include <algorithm>

#include <doctest/doctest.h>

#include "quern/error.h"
#include "quern/testkit/model_conformance.h"
#include "quern/testkit/plugin_under_test.h"

using namespace quern;
using namespace quern::llama;

namespace {

LlamaOptions small() {
  LlamaOptions o;
  o.vocab_size = 97, o.hidden_size = 48, o.intermediate_size = 40, o.num_hidden_layers = 2;
  o.num_attention_heads = 6, o.num_key_value_heads = 2;
  return o;
}

LlamaOptions from_config(const std::string& text) {
  const OptionValues fields = parse_hf_config(text, "config.json", llama_config());
  OptionValues values = default_values(llama_config().options);
  for (const auto& [key, value] : fields.all()) values.set(key, value);
  return llama_options().bind(values);
}

const ParameterSpec& find(const std::vector<ParameterSpec>& list, const std::string& name) {
  auto it = std::find_if(list.begin(), list.end(), [&](const ParameterSpec& spec) { return spec.name == name; });
  REQUIRE(it != list.end());
  return *it;
}

// Llama 3.2 1B, as transformers 5 writes it.
const char* const kLlama32 =
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
const char* const kLlama2 =
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
    LlamaOptions o = small();
    o.attention_bias = variant & 1, o.mlp_bias = variant & 2, o.tie_word_embeddings = variant & 4;
    for (const std::string& fault : testkit::model_faults(Llama(o))) FAIL_CHECK(fault);
  }
}

TEST_CASE("parameters are packed in Hugging Face's names and order") {
  LlamaOptions o = small();
  o.head_dim = 16, o.attention_bias = true, o.initializer_range = 0.01;
  const std::vector<ParameterSpec> list = Llama(o).parameters();
  const ParameterSpec& qkv = find(list, "qkv.weight");
  CHECK(qkv.extents == Extents{(6 + 2 * 2) * 16, 48});
  REQUIRE(qkv.parts.size() == 3);
  CHECK(qkv.parts[0].hf_name == "model.layers.{layer}.self_attn.q_proj.weight");
  CHECK(qkv.parts[1].hf_name == "model.layers.{layer}.self_attn.k_proj.weight");
  CHECK(qkv.parts[2].hf_name == "model.layers.{layer}.self_attn.v_proj.weight");
  CHECK(qkv.parts[0].rows == 96);
  CHECK(qkv.parts[2].rows == 32);
  CHECK(qkv.parts[1].init.deviation == 0.01);
  CHECK(qkv.decay);
  CHECK(find(list, "o.weight").extents == Extents{48, 96});
  CHECK(find(list, "gate_up.weight").parts[1].hf_name == "model.layers.{layer}.mlp.up_proj.weight");
  CHECK(find(list, "lm_head.weight").group == ParameterGroup::head);
  const ParameterSpec& bias = find(list, "qkv.bias");
  CHECK(bias.extents == Extents{160});
  CHECK(bias.parts[0].init.kind == Init::Kind::zeros);
  CHECK(!bias.decay);
  CHECK(find(list, "ffn_norm.weight").parts[0].init.kind == Init::Kind::ones);
  CHECK(!find(list, "final_norm.weight").decay);
}

TEST_CASE("published models have their published sizes") {
  Llama llama32(from_config(kLlama32)), llama2(from_config(kLlama2));
  CHECK(testkit::parameter_count(llama32) == 1235814400);
  CHECK(testkit::parameter_count(llama2) == 6738415616);
  CHECK(testkit::model_faults(llama32).empty());
  CHECK(llama32.traits().max_positions == 131072);
  CHECK(llama32.traits().width == 2048);
  LlamaOptions options = from_config(kLlama2);
  CHECK(options.rope_theta == 10000.0);
  CHECK(options.rms_norm_eps == 1e-5);
}

TEST_CASE("config.json survives reading and writing") {
  for (const char* text : {kLlama32, kLlama2}) {
    std::string once = Llama(from_config(text)).hf_config();
    CHECK(Llama(from_config(once)).hf_config() == once);
    CHECK(from_config(once).rope().factor == from_config(text).rope().factor);
  }
  LlamaOptions o = small();
  o.attention_bias = o.mlp_bias = true, o.rope_type = "yarn", o.factor = 4.0, o.attention_factor = 1.25;
  LlamaOptions back = from_config(Llama(o).hf_config());
  CHECK(back.attention_bias);
  CHECK(back.mlp_bias);
  CHECK(back.rope_type == "yarn");
  CHECK(back.attention_factor == 1.25);
  CHECK(back.num_key_value_heads == 2);
}

TEST_CASE("sizes that do not fit are refused when the model is made") {
  LlamaOptions o = small();
  o.num_key_value_heads = 4;
  CHECK_THROWS_WITH_AS(
      Llama{o}, doctest::Contains("model.llama: sizes that cannot be used:\n  num_key_value_heads: found 4"), Error);
}

TEST_CASE("the plugin makes a model from options") {
  OptionValues values;
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"})
    values.set(key, std::int64_t{8});
  CHECK_THROWS_WITH_AS(testkit::plugin_under_test<Model>("llama", values),
                       doctest::Contains("num_hidden_layers: missing"), Error);
  values.set("num_hidden_layers", std::int64_t{3});
  values.set("num_attention_heads", std::int64_t{2});
  CHECK(testkit::plugin_under_test<Model>("llama", values)->traits().layers == 3);
}
