#include "glm4.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kGlm4 = glm4::family();

// GLM-4-9B-0414, as published.
const std::string kNineB =
    R"({"architectures": ["Glm4ForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
  "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
  "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
  "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
  "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0", "use_cache": true, "vocab_size": 151552})";

}  // namespace

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kGlm4, kNineB, 9400279040);
}

TEST_CASE("adjacent pairs of half of each head rotate") {
  const std::vector<ParameterSpec> list = small_model(kGlm4, {{"attention_bias", true}})->parameters();
  const std::vector<std::int32_t> order{0, 2, 4, 6, 1, 3, 5, 7};
  for (const char* name : {"qkv.weight", "qkv.bias"}) {
    CHECK(parameter(list, name).parts[0].row_order == order);
    CHECK(parameter(list, name).parts[1].row_order == order);
    CHECK(parameter(list, name).parts[2].as_stored());
  }
  check_sound(*small_model(kGlm4, {{"attention_bias", true}}));
  CHECK_THROWS_WITH_AS(small_model(kGlm4, {{"partial_rotary_factor", 0.1}}),
                       doctest::Contains("partial_rotary_factor: 0 of 8 elements of a head"), Error);
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kGlm4); }

TEST_CASE("the plugin makes a model from options") { check_plugin(kGlm4); }
