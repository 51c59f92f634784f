#include "phi3.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kPhi3 = phi3::family();

// Phi-3 mini 4k, as published.
const std::string kMini =
    R"({"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "auto_map": null, "bos_token_id": 1, "embd_pdrop": 0.0,
  "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
  "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000,
  "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "sliding_window": 2047,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": true,
  "vocab_size": 32064})";
// Phi-4, as published.
const std::string kPhi4 =
    R"({"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 100257,
  "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
  "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40,
  "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
  "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 250000,
  "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.47.0",
  "use_cache": true, "vocab_size": 100352})";

}  // namespace

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kPhi3, kMini, 3821079552);
  check_published(kPhi3, kPhi4, 14659507200);
}

TEST_CASE("query, key and value are one tensor, and so are gate and up") {
  const std::vector<ParameterSpec> list = model_from(kPhi3, kPhi4)->parameters();
  REQUIRE(parameter(list, "qkv.weight").parts.size() == 1);
  CHECK(parameter(list, "qkv.weight").parts[0].hf_name == "model.layers.{layer}.self_attn.qkv_proj.weight");
  CHECK(parameter(list, "qkv.weight").parts[0].rows == 5120 + 2 * 1280);
  CHECK(parameter(list, "qkv.weight").parts[0].as_stored());
  CHECK(parameter(list, "gate_up.weight").parts.size() == 1);
}

TEST_CASE("of heads of which a part rotates, queries and keys are reordered") {
  const std::unique_ptr<Model> model =
      small_model(kPhi3, {{"partial_rotary_factor", 0.75}, {"sliding_window", std::int64_t{5}}});
  check_sound(*model);
  const std::vector<std::int32_t> order = parameter(model->parameters(), "qkv.weight").parts[0].row_order;
  REQUIRE(order.size() == (6 + 2 * 2) * 8);
  // Elements 0 1 2 turn with 3 4 5; half a head is 4.
  CHECK(std::vector<std::int32_t>(order.begin() + 8, order.begin() + 16) ==
        std::vector<std::int32_t>{8, 9, 10, 14, 11, 12, 13, 15});
  CHECK(order[79] == 79);  // values are as they are
}

TEST_CASE("longrope and dropout are refused") {
  check_refuses(kPhi3, kPhi4, R"("rope_scaling_": {"type": "longrope", "short_factor": [1.0]})", "rope_scaling_");
  check_refuses(kPhi3, kPhi4, R"("rope_parameters": {"rope_type": "longrope", "rope_theta": 250000})",
                "found \"longrope\"");
}

TEST_CASE("the plugin makes a model from options") { check_plugin(kPhi3); }
