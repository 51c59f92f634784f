#include "mistral.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kMistral = mistral::family();

// Mistral 7B v0.1, as published.
const std::string kFirst =
    R"({"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
  "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000})";
// v0.3: another vocabulary and no window.
const std::string kThird =
    R"({"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": true,
  "vocab_size": 32768})";

}  // namespace

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kMistral, kFirst, 7241732096);
  check_published(kMistral, kThird, 7248023552);
}

TEST_CASE("a window is of every layer, and none is written as null") {
  CHECK(testkit::model_programs(*model_from(kMistral, kFirst)).find("window = 4096") != std::string::npos);
  CHECK(testkit::model_programs(*model_from(kMistral, kThird)).find("window") == std::string::npos);
  CHECK(model_from(kMistral, kThird)->hf_config().find("\"sliding_window\": null") != std::string::npos);
  check_refuses(kMistral, kThird, R"("attention_bias": true)", "attention_bias: found true");
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kMistral); }

TEST_CASE("the plugin makes a model from options") { check_plugin(kMistral); }
