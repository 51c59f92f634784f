#pragma once
// Llama's block with a feed-forward of one matrix and squared ReLU in place of SwiGLU.

#include "quern/decoder.h"
#include "quern/hf_config.h"
#include "quern/model.h"

namespace squared_relu {

/// Fields that decoders share, by their Hugging Face names.
using Options = quern::DecoderOptions;

inline quern::HfModel hf_model() {
  return {.model_type = "squared_relu",
          .architecture = "SquaredReluForCausalLM",
          .options = quern::decoder_options<Options>().specs()};
}

class SquaredRelu final : public quern::Model {
 public:
  /// Throws a config error when the sizes do not fit together.
  explicit SquaredRelu(const Options& options);

  quern::ModelTraits traits() const override;
  std::vector<quern::ParameterSpec> parameters() const override;
  void embed(quern::ProgramBuilder& b) const override;
  void block(quern::ProgramBuilder& b) const override;
  void head(quern::ProgramBuilder& b) const override;
  std::string hf_config() const override { return write_hf_config(hf_model(), decoder_fields(o_)); }

 private:
  Options o_;
  quern::HeadLayout heads_;
  quern::RopeFrequencies rope_;
};

}  // namespace squared_relu
