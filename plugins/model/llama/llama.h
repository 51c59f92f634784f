#pragma once
// Llama 2, 3, 3.1 and 3.2. Touvron et al., "Llama 2" (2023); Dubey et al., "The Llama 3 Herd of Models" (2024).

#include "options.h"
#include "shared/decoder/decoder.h"

namespace quern::llama {

class Llama final : public decoder::Decoder {
 public:
  /// Throws a config error when the sizes do not fit together.
  explicit Llama(const LlamaOptions& options)
      : Decoder(options,
                {.qkv = options.attention_bias,
                 .o = options.attention_bias,
                 .gate_up = options.mlp_bias,
                 .down = options.mlp_bias},
                "llama"),
        options_(options) {}

  std::string hf_config() const override {
    OptionValues fields = decoder_fields(options_);
    fields.set("attention_bias", options_.attention_bias);
    fields.set("mlp_bias", options_.mlp_bias);
    return write_hf_config(llama_config(), fields);
  }

 private:
  LlamaOptions options_;
};

}  // namespace quern::llama
