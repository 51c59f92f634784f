#pragma once
// Llama's block with a feed-forward of one matrix and squared ReLU in place of SwiGLU.

#include "options.h"
#include "quern/model.h"

namespace squared_relu {

class SquaredRelu final : public quern::Model {
 public:
  /// Throws a config error when the sizes do not fit together.
  explicit SquaredRelu(const Options& options);

  quern::ModelTraits traits() const override;
  std::vector<quern::ParameterSpec> parameters() const override;
  void embed(quern::ProgramBuilder& b) const override;
  void block(quern::ProgramBuilder& b, std::int64_t layer) const override;
  void head(quern::ProgramBuilder& b) const override;
  std::string hf_config() const override;

 private:
  Options o_;
  quern::HeadLayout heads_;
  quern::RopeFrequencies rope_;
};

}  // namespace squared_relu
