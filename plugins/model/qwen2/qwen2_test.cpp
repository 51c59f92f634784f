#include "qwen2.h"

#include <doctest/doctest.h>

#include "quern/error.h"
#include "quern/testkit/model_conformance.h"
#include "quern/testkit/plugin_under_test.h"

using namespace quern;
using namespace quern::qwen2;

namespace {

Qwen2Options from_config(const std::string& text) {
  const OptionValues fields = parse_hf_config(text, "config.json", qwen2_config());
  OptionValues values = default_values(qwen2_config().options);
  for (const auto& [key, value] : fields.all()) values.set(key, value);
  return qwen2_options().bind(values);
}

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
  Qwen2Options o = from_config(kQwen25);
  Qwen2 tied(o);
  for (const std::string& fault : testkit::model_faults(tied)) FAIL_CHECK(fault);
  CHECK(testkit::parameter_count(tied) == 494032768);
  CHECK(tied.traits().layers == 24);
  CHECK(tied.traits().vocabulary == 151936);
  o.tie_word_embeddings = false;
  Qwen2 untied(o);
  for (const std::string& fault : testkit::model_faults(untied)) FAIL_CHECK(fault);
  CHECK(testkit::parameter_count(untied) == 494032768 + 151936 * 896);
}

TEST_CASE("query, key and value have biases and nothing else has") {
  std::int64_t biases = 0;
  for (const ParameterSpec& spec : Qwen2(from_config(kQwen25)).parameters()) {
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

TEST_CASE("config.json survives reading and writing") {
  std::string once = Qwen2(from_config(kQwen25)).hf_config();
  CHECK(Qwen2(from_config(once)).hf_config() == once);
  CHECK(from_config(once).rope_theta == 1e6);
  CHECK(Qwen2Options().max_position_embeddings == 32768);
}

TEST_CASE("sliding windows and fields of other models are refused") {
  auto with = [](const std::string& fields) { return kQwen25.substr(0, kQwen25.size() - 1) + ", " + fields + "}"; };
  std::string windows = kQwen25;
  windows.replace(windows.find("\"use_sliding_window\": false"), 27, "\"use_sliding_window\": true ");
  CHECK_THROWS_WITH_AS(from_config(windows), doctest::Contains("use_sliding_window: found true, expected false"),
                       Error);
  CHECK_THROWS_WITH_AS(from_config(with(R"("layer_types": ["sliding_attention"])")), doctest::Contains("layer_types"),
                       Error);
  CHECK_THROWS_WITH_AS(from_config(with(R"("attention_bias": false)")), doctest::Contains("attention_bias"), Error);
  CHECK_THROWS_WITH_AS(from_config(with(R"("rope_scaling": {"type": "dynamic", "factor": 2.0})")),
                       doctest::Contains("found \"dynamic\""), Error);
}

TEST_CASE("the plugin makes a model from options") {
  OptionValues values;
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"})
    values.set(key, std::int64_t{8});
  values.set("head_dim", std::int64_t{4});
  CHECK(testkit::plugin_under_test<Model>("qwen2", values)->traits().max_positions == 32768);
}
