#pragma once
// SmolLM3: Llama's block, in which some layers do not rotate. Yang et al., "RoPE to NoPE and Back Again" (2025).

#include "shared/decoder/family.h"

namespace quern::smollm3 {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.biases = {.qkv = f.attention_bias, .o = f.attention_bias, .gate_up = f.mlp_bias, .down = f.mlp_bias};
  d.forms.push_back({});  // no rope
  for (std::int64_t layer = 0; layer < f.num_hidden_layers; ++layer) {
    const bool rotates = f.no_rope_layers.empty() ? (layer + 1) % f.no_rope_layer_interval != 0
                                                  : f.no_rope_layers[static_cast<std::size_t>(layer)] != 0;
    d.form_of_layer.push_back(rotates ? 0 : 1);
  }
  return d;
}

inline decoder::Family family() {
  return {
      .model_type = "smollm3",
      .architecture = "SmolLM3ForCausalLM",
      .summary = "SmolLM3",
      .fields = {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
      .defaults = {{"max_position_embeddings", std::int64_t{32768}},
                   {"rope_theta", 2000000.0},
                   {"tie_word_embeddings", true}},
      .neutral = {{.key = "use_sliding_window", .accepted = {false}, .because = "quern attends to all earlier tokens"},
                  {.key = "sliding_window"},  // these two say nothing unless it is used
                  {.key = "max_window_layers"}},
      .describe = describe};
}

}  // namespace quern::smollm3
