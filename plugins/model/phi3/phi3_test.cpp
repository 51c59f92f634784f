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

// Phi-4-mini, as published, but for the values of its 48 factors.
std::string phi4_mini() {
  std::string factors = "1.0";
  for (int i = 1; i < 48; ++i) factors += ", " + std::to_string(1 + i);
  return R"({"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
  "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu",
  "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1,
  "lm_head_bias": false, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "phi3",
  "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0,
  "rms_norm_eps": 1e-05, "rope_scaling": {"long_factor": [)" +
         factors + R"(], "short_factor": [)" + factors + R"(], "type": "longrope"}, "rope_theta": 10000.0,
  "sliding_window": 262144, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
  "vocab_size": 200064})";
}

}  // namespace

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kPhi3, kMini, 3821079552);
  check_published(kPhi3, kPhi4, 14659507200);
  check_published(kPhi3, phi4_mini(), 3836021760);
}

TEST_CASE("query, key and value are one tensor, and so are gate and up") {
  const std::vector<ParameterSpec> list = model_from(kPhi3, kPhi4)->parameters();
  REQUIRE(parameter(list, "qkv.weight").parts.size() == 1);
  CHECK(parameter(list, "qkv.weight").parts[0].hf_name == "model.layers.{layer}.self_attn.qkv_proj.weight");
  CHECK(parameter(list, "qkv.weight").parts[0].rows == 5120 + 2 * 1280);
  CHECK(parameter(list, "qkv.weight").parts[0].as_stored());
  CHECK(parameter(list, "qkv.weight").parts[0].heads ==
        std::vector<HeadRows>{{40, 128, 4}, {10, 128, 1}, {10, 128, 1}});
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

TEST_CASE("longrope has a factor for each pair that rotates, and no other scaling") {
  const std::string fitting = R"("rope_parameters": {"rope_type": "longrope", "rope_theta": 250000, )";
  check_refuses(kPhi3, kPhi4, fitting + R"("short_factor": [1.0], "long_factor": [2, -3]})",
                "short_factor: found 1 numbers, expected 64 above 0, one for each pair that rotates");
  check_refuses(kPhi3, kPhi4, fitting + R"("original_max_position_embeddings": 4096})",
                "original_max_position_embeddings: found 4096, but original_max_position_embeddings is 16384");
  check_refuses(kPhi3, kPhi4, fitting + R"("factor": 8})", "factor: given, but rope_type longrope does not use it");
  check_refuses(kPhi3, kPhi4, R"("rope_parameters": {"rope_theta": 250000, "long_factor": [1.5]})",
                "long_factor: found 1 numbers, expected 0 above 0, since rope_type is default");
  check_refuses(kPhi3, kPhi4, R"("rope_parameters": {"rope_theta": 250000, "rope_type": "su"})", "found \"su\"");
  std::string longer = kPhi4;
  longer.replace(longer.find("16384"), 5, "32768");  // max_position_embeddings
  CHECK_THROWS_WITH_AS(model_from(kPhi3, longer), doctest::Contains("or rope_type longrope"), Error);
}

TEST_CASE("interpolated positions are refused") {
  check_refuses(kPhi3, kMini, R"("interpolate_factor": 2)", "interpolate_factor: found 2, expected 1");
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kPhi3); }

TEST_CASE("the plugin makes a model from options") { check_plugin(kPhi3); }
