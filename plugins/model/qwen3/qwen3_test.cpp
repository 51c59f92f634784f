#include "qwen3.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kQwen3 = qwen3::family();

// Qwen3 0.6B, as published; and 8B.
const std::string kQwen3Small =
    R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
  "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
  "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
  "vocab_size": 151936})";
const std::string kQwen38B =
    R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
  "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
  "vocab_size": 151936})";

}  // namespace

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kQwen3, kQwen3Small, 596049920);
  check_published(kQwen3, kQwen38B, 8190735360);
}

TEST_CASE("queries and keys have norms as wide as a head, and biases only if asked for") {
  for (bool biases : {false, true}) {
    const std::unique_ptr<Model> model =
        small_model(kQwen3, {{"head_dim", std::int64_t{10}}, {"attention_bias", biases}});
    check_sound(*model);
    const std::vector<ParameterSpec> list = model->parameters();
    CHECK(parameter(list, "q_norm.weight").extents == Extents{10});
    CHECK(parameter(list, "k_norm.weight").parts[0].hf_name == "model.layers.{layer}.self_attn.k_norm.weight");
    CHECK(!parameter(list, "k_norm.weight").decay);
    CHECK(std::count_if(list.begin(), list.end(),
                        [](const ParameterSpec& spec) { return spec.name.ends_with(".bias"); }) == (biases ? 2 : 0));
  }
}

TEST_CASE("sliding windows and experts are refused") {
  check_refuses(kQwen3, kQwen3Small, R"("layer_types": ["sliding_attention"])", "layer_types");
  check_refuses(kQwen3, kQwen3Small, R"("num_experts": 128)", "num_experts: found 128");
  check_refuses(kQwen3, kQwen3Small, R"("mlp_bias": true)", "mlp_bias: found true");
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kQwen3); }

TEST_CASE("the plugin makes a model from options") { check_plugin(kQwen3); }
