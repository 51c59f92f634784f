#pragma once
// Options of [model.qwen2], which are also the fields of its config.json that are honoured.

#include "quern/decoder.h"
#include "quern/hf_config.h"

namespace quern::qwen2 {

struct Qwen2Options : DecoderOptions {
  Qwen2Options() { max_position_embeddings = 32768; }
};

inline OptionTable<Qwen2Options> qwen2_options() { return decoder_options<Qwen2Options>(); }

inline HfModel qwen2_config() {
  return {
      .model_type = "qwen2",
      .architecture = "Qwen2ForCausalLM",
      .options = qwen2_options().specs(),
      .neutral = {{.key = "use_sliding_window", .accepted = {false}, .because = "quern attends to all earlier tokens"},
                  {.key = "sliding_window"},  // these two say nothing unless it is used
                  {.key = "max_window_layers"},
                  {.key = "use_mrope", .accepted = {false}, .because = "quern knows text positions only"}}};
}

}  // namespace quern::qwen2
