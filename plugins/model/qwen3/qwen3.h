#pragma once
// Qwen3, dense: Llama's block with a norm of each query and key head, and a head_dim of its own. Yang et al., "Qwen3
// Technical Report" (2025).

#include "shared/decoder/family.h"

namespace quern::qwen3 {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.qk_norm = decoder::QkNorm::head;
  d.biases.qkv = d.biases.o = f.attention_bias;
  return d;
}

inline decoder::Family family() {
  return {
      .model_type = "qwen3",
      .architecture = "Qwen3ForCausalLM",
      .summary = "Qwen3 (dense)",
      .fields = {"attention_bias"},
      .defaults = {{"head_dim", std::int64_t{128}}, {"max_position_embeddings", std::int64_t{32768}}},
      .neutral = {{.key = "use_sliding_window", .accepted = {false}, .because = "quern attends to all earlier tokens"},
                  {.key = "sliding_window"},  // these two say nothing unless it is used
                  {.key = "max_window_layers"}},
      .describe = describe};
}

}  // namespace quern::qwen3
