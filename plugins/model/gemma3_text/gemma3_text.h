#pragma once
// Gemma 3, text: norms around the branches and of each query and key head; five layers look at a window, with a rope
// base of their own, then one at all. Gemma team, "Gemma 3 Technical Report" (2025).

#include <cmath>

#include "shared/decoder/family.h"

namespace quern::gemma3_text {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.norm_offset = 1;
  d.qk_norm = decoder::QkNorm::head;
  d.activation = decoder::Activation::geglu;
  d.embedding_scale = std::sqrt(static_cast<double>(f.hidden_size));
  d.attention_scale = 1 / std::sqrt(static_cast<double>(f.query_pre_attn_scalar));
  d.logit_cap = f.final_logit_softcapping;
  d.biases.qkv = d.biases.o = f.attention_bias;
  d.names.attn_after_norm = "post_attention_layernorm";
  d.names.ffn_norm = "pre_feedforward_layernorm";
  d.names.ffn_after_norm = "post_feedforward_layernorm";
  RopeConfig local;  // windows are short, so that their rope is not scaled
  local.theta = f.rope_local_base_freq;
  const decoder::LayerForm windowed{.rope = rope_frequencies(local, f.rotated()), .window = f.sliding_window};
  set_forms(d, f, decoder::LayerForm(d.forms[0]), windowed,
            [&f](std::int64_t layer) { return (layer + 1) % f.sliding_window_pattern != 0; });
  return d;
}

inline decoder::Family family() {
  return {.model_type = "gemma3_text",
          .architecture = "Gemma3ForCausalLM",
          .summary = "Gemma 3 (text)",
          .fields = {"attention_bias", "sliding_window", "sliding_window_pattern", "layer_types",
                     "query_pre_attn_scalar", "rope_local_base_freq", "final_logit_softcapping"},
          .defaults = {{"head_dim", std::int64_t{256}},
                       {"max_position_embeddings", std::int64_t{131072}},
                       {"rope_theta", 1000000.0},
                       {"tie_word_embeddings", true}},
          .hidden_act = {"gelu_pytorch_tanh"},
          .neutral = {{.key = "_sliding_window_pattern"},  // layer_types is beside it
                      {.key = "attn_logit_softcapping",
                       .accepted = {0.0},
                       .because = "transformers caps no scores of Gemma 3, so quern does not either"},
                      {.key = "hidden_activation",
                       .accepted = {std::string("gelu_pytorch_tanh")},
                       .because = "quern has no other gate for Gemma"},
                      {.key = "rope_scaling.sliding_attention.rope_type",
                       .accepted = {std::string("default")},
                       .because = "quern does not scale the rope of windows"},
                      {.key = "use_bidirectional_attention", .accepted = {false}, .because = "quern's mask is causal"}},
          .describe = describe};
}

}  // namespace quern::gemma3_text
