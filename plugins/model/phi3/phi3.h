#pragma once
// Phi-3 and Phi-4: Llama's block with packed weights, in some versions with a window or heads of which a part rotates.
// Abdin et al., "Phi-3 Technical Report" (2024), "Phi-4 Technical Report" (2024).

#include "shared/decoder/family.h"

namespace quern::phi3 {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.forms[0].window = f.sliding_window;
  d.names.qkv = {"self_attn.qkv_proj"};
  d.names.gate_up = {"mlp.gate_up_proj"};
  return d;
}

inline decoder::Family family() {
  const char* no_dropout = "quern does not apply dropout";
  return {.model_type = "phi3",
          .architecture = "Phi3ForCausalLM",
          .summary = "Phi-3, Phi-4",
          .fields = {"partial_rotary_factor", "sliding_window", "original_max_position_embeddings",
                     "rope_scaling.short_factor", "rope_scaling.long_factor"},
          .defaults = {{"max_position_embeddings", std::int64_t{4096}}, {"rms_norm_eps", 1e-5}},
          .neutral = {{.key = "attention_bias", .accepted = {false}, .because = "Phi-3 has no biases"},
                      {.key = "resid_pdrop", .accepted = {0.0}, .because = no_dropout},
                      {.key = "embd_pdrop", .accepted = {0.0}, .because = no_dropout},
                      {.key = "interpolate_factor", .accepted = {1.0}, .because = "quern interpolates no positions"},
                      {.key = "full_attn_mod", .accepted = {1.0}, .because = "all layers attend alike"},
                      {.key = "auto_map"}},  // code that transformers has under the model's type
          .describe = describe};
}

}  // namespace quern::phi3
