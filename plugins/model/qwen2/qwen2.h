#pragma once
// Qwen2 and Qwen2.5: Llama's block with biases on query, key and value. Yang et al., "Qwen2 Technical Report" (2024).

#include "options.h"
#include "quern/model.h"

namespace quern::qwen2 {

class Qwen2 final : public Model {
 public:
  /// Throws a config error when the sizes do not fit together.
  explicit Qwen2(const Qwen2Options& options);

  ModelTraits traits() const override;
  std::vector<ParameterSpec> parameters() const override;
  void embed(ProgramBuilder& b) const override;
  void block(ProgramBuilder& b) const override;
  void head(ProgramBuilder& b) const override;
  std::string hf_config() const override;

 private:
  Qwen2Options o_;
  HeadLayout heads_;
  RopeFrequencies rope_;
};

}  // namespace quern::qwen2
