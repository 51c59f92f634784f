#include "gemma2.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kGemma2 = gemma2::family();

// Gemma 2 2B, as published.
const std::string kTwoB =
    R"({"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
  "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
  "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
  "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26,
  "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
  "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.4",
  "use_cache": true, "vocab_size": 256000})";

}  // namespace

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kGemma2, kTwoB, 2614341888);
  // transformers 5 takes no float here.
  CHECK(model_from(kGemma2, kTwoB)->hf_config().find("\"query_pre_attn_scalar\": 256,") != std::string::npos);
}

TEST_CASE("every other layer looks at a window, from the first on, or the layers that a list names") {
  const std::unique_ptr<Model> model = model_from(kGemma2, kTwoB);
  CHECK(model->block_kind(0) == 1);
  CHECK(model->block_kind(1) == 0);
  const std::unique_ptr<Model> listed =
      small_model(kGemma2, {{"sliding_window", std::int64_t{3}},
                            {"layer_types", std::vector<std::string>{"full_attention", "sliding_attention"}},
                            {"attn_logit_softcapping", 2.0}});
  check_sound(*listed);
  CHECK(listed->block_kind(0) == 0);
  CHECK(listed->block_kind(1) == 1);
  CHECK(parameter(listed->parameters(), "final_norm.weight").parts[0].offset == 1);
}

TEST_CASE("another gate is refused") {
  std::string silu = kTwoB;
  silu.replace(silu.find("\"hidden_activation\": \"gelu_pytorch_tanh\""), 40, "\"hidden_activation\": \"silu\"");
  CHECK_THROWS_WITH_AS(model_from(kGemma2, silu), doctest::Contains("hidden_activation: found \"silu\""), Error);
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kGemma2); }

TEST_CASE("the plugin makes a model from options") { check_plugin(kGemma2); }
