#include "gemma3_text.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kGemma3 = gemma3_text::family();

// Gemma 3 1B, as published.
const std::string kOneB =
    R"({"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
  "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
  "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
  "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
  "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
  "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
  "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144})";
// A small one, as transformers 5 writes it.
const std::string kNew =
    R"({"_sliding_window_pattern": 3, "attention_bias": false, "architectures": ["Gemma3ForCausalLM"],
  "attn_logit_softcapping": null, "final_logit_softcapping": null, "head_dim": 10, "hidden_size": 24,
  "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "intermediate_size": 40,
  "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 64, "model_type": "gemma3_text",
  "num_attention_heads": 6, "num_hidden_layers": 2, "num_key_value_heads": 2, "query_pre_attn_scalar": 13,
  "rms_norm_eps": 1e-06, "rope_parameters": {"full_attention": {"rope_theta": 1000000.0, "rope_type": "linear",
  "factor": 8.0}, "sliding_attention": {"rope_theta": 20000.0, "rope_type": "default"}}, "sliding_window": 5,
  "sliding_window_pattern": 3, "tie_word_embeddings": true, "use_bidirectional_attention": false, "vocab_size": 97})";

}  // namespace

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kGemma3, kOneB, 999885952);
  check_published(kGemma3, kNew, 16024);
}

TEST_CASE("five layers look at a window, then one at all") {
  const std::unique_ptr<Model> model = model_from(kGemma3, kOneB);
  for (std::int64_t layer = 0; layer < 26; ++layer) CHECK(model->block_kind(layer) == (layer % 6 == 5 ? 0 : 1));
}

TEST_CASE("tables of rope for each kind of layer are read") {
  const OptionValues values = values_from(kGemma3, kNew);
  CHECK(values.get<double>("rope_theta") == 1e6);
  CHECK(values.get<double>("rope_scaling.factor") == 8);
  CHECK(values.get<double>("rope_local_base_freq") == 20000);
  check_refuses(kGemma3, kOneB,
                R"("rope_parameters": {"sliding_attention": {"rope_type": "linear", "rope_theta": 10000}})",
                "rope_parameters.sliding_attention.rope_type: found \"linear\"");
}

TEST_CASE("a cap of scores, which transformers ignores, is refused") {
  std::string capped = kOneB;
  capped.replace(capped.find("\"attn_logit_softcapping\": null"), 30, "\"attn_logit_softcapping\": 50.0");
  CHECK_THROWS_WITH_AS(model_from(kGemma3, capped), doctest::Contains("attn_logit_softcapping: found 50.0"), Error);
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kGemma3); }

TEST_CASE("the plugin makes a model from options") { check_plugin(kGemma3); }
