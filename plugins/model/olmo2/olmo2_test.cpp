#include "olmo2.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kOlmo2 = olmo2::family();

// OLMo 2 7B, as published.
const std::string kSevenB =
    R"({"architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 100257,
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
  "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 500000,
  "tie_word_embeddings": false, "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "use_cache": true,
  "vocab_size": 100352})";

}  // namespace

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kOlmo2, kSevenB, 7298617344);
}

TEST_CASE("norms are after the branches, and as wide as all query and all key heads") {
  const std::vector<ParameterSpec> list = small_model(kOlmo2, {{"attention_bias", true}})->parameters();
  CHECK(parameter(list, "q_norm.weight").extents == Extents{48});
  CHECK(parameter(list, "k_norm.weight").extents == Extents{16});
  CHECK(parameter(list, "attn_after_norm.weight").parts[0].hf_name ==
        "model.layers.{layer}.post_attention_layernorm.weight");
  CHECK(std::none_of(list.begin(), list.end(),
                     [](const ParameterSpec& spec) { return spec.name == "attn_norm.weight"; }));
  check_sound(*small_model(kOlmo2, {{"attention_bias", true}}));
  check_refuses(kOlmo2, kSevenB, R"("sliding_window": 4096)", "sliding_window: found 4096");
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kOlmo2); }

TEST_CASE("the plugin makes a model from options") { check_plugin(kOlmo2); }
