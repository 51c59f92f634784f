#include "qwen2.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kQwen2 = qwen2::family();

// Qwen2.5 0.5B, as published.
const std::string kQwen25 =
    R"({"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
  "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
  "max_position_embeddings": 32768,
  "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
  "vocab_size": 151936})";

}  // namespace

TEST_CASE("Qwen2.5 0.5B is a sound model of its published size, tied and untied") {
  check_published(kQwen2, kQwen25, 494032768);
  CHECK(model_from(kQwen2, kQwen25)->traits().layers == 24);
  CHECK(model_from(kQwen2, kQwen25)->traits().vocabulary == 151936);
  CHECK(values_from(kQwen2, kQwen25).get<double>("rope_theta") == 1e6);
  check_sound(*small_model(kQwen2, {{"tie_word_embeddings", false}}));
  CHECK(small_model(kQwen2)->traits().max_positions == 32768);
}

TEST_CASE("query, key and value have biases and nothing else has") {
  std::int64_t biases = 0;
  for (const ParameterSpec& spec : model_from(kQwen2, kQwen25)->parameters()) {
    if (!spec.name.ends_with(".bias")) continue;
    ++biases;
    CHECK(spec.name == "qkv.bias");
    CHECK(spec.extents == Extents{(14 + 2 * 2) * 64});
    CHECK(!spec.decay);
    REQUIRE(spec.parts.size() == 3);
    CHECK(spec.parts[2].hf_name == "model.layers.{layer}.self_attn.v_proj.bias");
    CHECK(spec.parts[2].rows == 128);
  }
  CHECK(biases == 1);
}

TEST_CASE("sliding windows and fields of other models are refused") {
  std::string windows = kQwen25;
  windows.replace(windows.find("\"use_sliding_window\": false"), 27, "\"use_sliding_window\": true ");
  CHECK_THROWS_WITH_AS(model_from(kQwen2, windows), doctest::Contains("use_sliding_window: found true, expected false"),
                       Error);
  check_refuses(kQwen2, kQwen25, R"("layer_types": ["sliding_attention"])", "layer_types");
  check_refuses(kQwen2, kQwen25, R"("attention_bias": false)", "attention_bias");
  check_refuses(kQwen2, kQwen25, R"("rope_scaling": {"type": "dynamic", "factor": 2.0})", "found \"dynamic\"");
  std::string million = kQwen25;  // as Qwen2.5-7B-Instruct-1M
  million.insert(1, R"("dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}, )");
  model_from(kQwen2, million);
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kQwen2); }

TEST_CASE("the plugin makes a model from options") { check_plugin(kQwen2); }
