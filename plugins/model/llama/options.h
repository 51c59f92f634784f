#pragma once
// Options of [model.llama], which are also the fields of its config.json that are honoured.

#include "quern/decoder.h"
#include "quern/hf_config.h"

namespace quern::llama {

struct LlamaOptions : DecoderOptions {
  bool attention_bias = false;
  bool mlp_bias = false;
};

inline OptionTable<LlamaOptions> llama_options() {
  OptionTable<LlamaOptions> t = decoder_options<LlamaOptions>();
  t.add("attention_bias", &LlamaOptions::attention_bias, "biases on the query, key, value and output projections");
  t.add("mlp_bias", &LlamaOptions::mlp_bias, "biases on the gate, up and down projections");
  return t;
}

inline HfModel llama_config() {
  return {
      .model_type = "llama",
      .architecture = "LlamaForCausalLM",
      .options = llama_options().specs(),
      .neutral = {
          {.key = "rope_interleaved", .accepted = {false}, .because = "quern rotates halves, as Hugging Face does"}}};
}

}  // namespace quern::llama
