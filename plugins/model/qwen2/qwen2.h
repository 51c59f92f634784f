#pragma once
// Qwen2 and Qwen2.5: Llama's block with biases on query, key and value. Yang et al., "Qwen2 Technical Report" (2024).

#include "options.h"
#include "shared/decoder/decoder.h"

namespace quern::qwen2 {

class Qwen2 final : public decoder::Decoder {
 public:
  /// Throws a config error when the sizes do not fit together.
  explicit Qwen2(const Qwen2Options& options) : Decoder(options, {.qkv = true}, "qwen2"), options_(options) {}

  std::string hf_config() const override { return write_hf_config(qwen2_config(), decoder_fields(options_)); }

 private:
  Qwen2Options options_;
};

}  // namespace quern::qwen2
