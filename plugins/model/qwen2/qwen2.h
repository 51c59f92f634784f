#pragma once
// Qwen2 and Qwen2.5: Llama's block with biases on query, key and value. Yang et al., "Qwen2 Technical Report" (2024).

#include "shared/decoder/family.h"

namespace quern::qwen2 {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.biases.qkv = true;
  return d;
}

inline decoder::Family family() {
  return {
      .model_type = "qwen2",
      .architecture = "Qwen2ForCausalLM",
      .summary = "Qwen2, Qwen2.5",
      .defaults = {{"max_position_embeddings", std::int64_t{32768}}},
      .neutral = {{.key = "use_sliding_window", .accepted = {false}, .because = "quern attends to all earlier tokens"},
                  {.key = "sliding_window"},  // these two say nothing unless it is used
                  {.key = "max_window_layers"},
                  {.key = "dual_chunk_attention_config"},  // of texts over 262,144 tokens
                  {.key = "use_mrope", .accepted = {false}, .because = "quern knows text positions only"}},
      .describe = describe};
}

}  // namespace quern::qwen2
