#pragma once
// Gemma 2: norms around the branches, soft caps, and a window in every other layer. Gemma team, "Gemma 2" (2024).

#include <cmath>

#include "shared/decoder/family.h"

namespace quern::gemma2 {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.norm_offset = 1;
  d.activation = decoder::Activation::geglu;
  d.embedding_scale = std::sqrt(static_cast<double>(f.hidden_size));
  d.attention_scale = 1 / std::sqrt(static_cast<double>(f.query_pre_attn_scalar));
  d.attention_cap = f.attn_logit_softcapping;
  d.logit_cap = f.final_logit_softcapping;
  d.biases.qkv = d.biases.o = f.attention_bias;
  d.names.attn_after_norm = "post_attention_layernorm";
  d.names.ffn_norm = "pre_feedforward_layernorm";
  d.names.ffn_after_norm = "post_feedforward_layernorm";
  const decoder::LayerForm full = d.forms[0], windowed{.rope = full.rope, .window = f.sliding_window};
  set_forms(d, f, full, windowed, [](std::int64_t layer) { return layer % 2 == 0; });
  return d;
}

inline decoder::Family family() {
  return {.model_type = "gemma2",
          .architecture = "Gemma2ForCausalLM",
          .summary = "Gemma 2",
          .fields = {"attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar",
                     "attn_logit_softcapping", "final_logit_softcapping"},
          .defaults = {{"head_dim", std::int64_t{256}},
                       {"max_position_embeddings", std::int64_t{8192}},
                       {"tie_word_embeddings", true}},
          .hidden_act = {"gelu_pytorch_tanh"},
          .neutral = {{.key = "hidden_activation",
                       .accepted = {std::string("gelu_pytorch_tanh")},
                       .because = "quern has no other gate for Gemma"},
                      {.key = "use_bidirectional_attention", .accepted = {false}, .because = "quern's mask is causal"}},
          .describe = describe};
}

}  // namespace quern::gemma2
