#pragma once
// Mistral 7B and the models of its shape: Llama's block, in some versions with a window. Jiang et al., "Mistral 7B"
// (2023).

#include "shared/decoder/family.h"

namespace quern::mistral {

inline decoder::Description describe(const decoder::Fields& f) {
  decoder::Description d = decoder::llama_shape(f);
  d.forms[0].window = f.sliding_window;
  return d;
}

inline decoder::Family family() {
  return {.model_type = "mistral",
          .architecture = "MistralForCausalLM",
          .summary = "Mistral 7B, Nemo and others of one shape",
          .fields = {"sliding_window"},
          .defaults = {{"max_position_embeddings", std::int64_t{131072}}},
          .describe = describe};
}

}  // namespace quern::mistral
