#pragma once
// OLMo 2: norms after the branches, and of all queries and all keys. OLMo team, "2 OLMo 2 Furious" (2025).

#include "shared/decoder/family.h"

namespace quern::olmo2 {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.qk_norm = decoder::QkNorm::width;
  d.biases.qkv = d.biases.o = f.attention_bias;
  d.names.attn_norm = d.names.ffn_norm = "";
  d.names.attn_after_norm = "post_attention_layernorm";
  d.names.ffn_after_norm = "post_feedforward_layernorm";
  return d;
}

inline decoder::Family family() {
  return {.model_type = "olmo2",
          .architecture = "Olmo2ForCausalLM",
          .summary = "OLMo 2",
          .fields = {"attention_bias"},
          .defaults = {{"rms_norm_eps", 1e-5}},
          .describe = describe};
}

}  // namespace quern::olmo2
