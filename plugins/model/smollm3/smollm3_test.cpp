#include "smollm3.h"

#include "shared/decoder/family_testing.h"

using namespace quern;
using namespace quern::decoder;

namespace {

const Family kSmolLM3 = smollm3::family();

// SmolLM3 3B, as published, but for its generation fields.
const std::string kThreeB =
    R"({"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": null, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 11008, "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 65536,
  "max_window_layers": 28, "mlp_bias": false, "model_type": "smollm3", "no_rope_layer_interval": 4,
  "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0,
  1, 1, 1, 0], "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004,
  "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null,
  "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": false, "use_sliding_window": false,
  "vocab_size": 128256})";

}  // namespace

TEST_CASE("published models have their published sizes, and their config.json survives reading and writing") {
  check_published(kSmolLM3, kThreeB, 3075098624);
}

TEST_CASE("every fourth layer does not rotate, or the layers that a list names") {
  const std::unique_ptr<Model> model = model_from(kSmolLM3, kThreeB);
  const std::unique_ptr<Model> small = small_model(kSmolLM3, {{"num_hidden_layers", std::int64_t{8}}});
  for (std::int64_t layer = 0; layer < 8; ++layer) {
    CHECK(model->block_kind(layer) == (layer % 4 == 3 ? 1 : 0));
    CHECK(small->block_kind(layer) == model->block_kind(layer));
  }
  check_sound(*small);
  const std::unique_ptr<Model> listed = small_model(kSmolLM3, {{"no_rope_layers", std::vector<double>{0, 1}}});
  CHECK(listed->block_kind(0) == 1);
  CHECK(listed->block_kind(1) == 0);
  check_refuses(kSmolLM3, kThreeB, R"("attn_bias": true)", "attn_bias: found true");
  CHECK_THROWS_WITH_AS(small_model(kSmolLM3, {{"no_rope_layers", std::vector<double>{1}}}),
                       doctest::Contains("no_rope_layers: found 1 entries, expected 2"), Error);
}

TEST_CASE("goldens use every switch of the family") { check_goldens(kSmolLM3); }

TEST_CASE("the plugin makes a model from options") { check_plugin(kSmolLM3); }
