#pragma once
// Llama 2, 3, 3.1 and 3.2. Touvron et al., "Llama 2" (2023); Dubey et al., "The Llama 3 Herd of Models" (2024).

#include "shared/decoder/family.h"

namespace quern::llama {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.biases = {.qkv = f.attention_bias, .o = f.attention_bias, .gate_up = f.mlp_bias, .down = f.mlp_bias};
  return d;
}

inline decoder::Family family() {
  return {
      .model_type = "llama",
      .architecture = "LlamaForCausalLM",
      .summary = "Llama 2, 3, 3.1, 3.2; SmolLM2",
      .fields = {"attention_bias", "mlp_bias"},
      .neutral = {{.key = "rope_interleaved",
                   .accepted = {false},
                   .because = "quern rotates halves, as Hugging Face does"},
                  {.key = "sliding_window"},  // these three are of converted models, and no Llama has windows
                  {.key = "max_window_layers"},
                  {.key = "use_sliding_window", .accepted = {false}, .because = "quern attends to all earlier tokens"}},
      .describe = describe};
}

}  // namespace quern::llama
