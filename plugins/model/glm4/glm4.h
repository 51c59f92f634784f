#pragma once
// GLM-4 (0414): norms around the branches, and adjacent pairs of a part of each head rotate. GLM team, "ChatGLM"
// (2024).

#include "shared/decoder/family.h"

namespace quern::glm4 {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.rope_pairs = decoder::RopePairs::adjacent;
  d.biases.qkv = f.attention_bias;
  d.names.attn_after_norm = "post_self_attn_layernorm";
  d.names.ffn_after_norm = "post_mlp_layernorm";
  d.names.gate_up = {"mlp.gate_up_proj"};
  return d;
}

inline decoder::Family family() {
  return {.model_type = "glm4",
          .architecture = "Glm4ForCausalLM",
          .summary = "GLM-4-0414",
          .fields = {"attention_bias", "partial_rotary_factor"},
          .defaults = {{"head_dim", std::int64_t{128}},
                       {"max_position_embeddings", std::int64_t{131072}},
                       {"partial_rotary_factor", 0.5},
                       {"rms_norm_eps", 0.00000015625}},
          .describe = describe};
}

}  // namespace quern::glm4
