#pragma once
// Llama 2, 3, 3.1 and 3.2: norm, grouped-query attention with rotary positions, norm, gated feed-forward.
// Touvron et al., "Llama 2" (2023); Dubey et al., "The Llama 3 Herd of Models" (2024).

#include "options.h"
#include "quern/model.h"

namespace quern::llama {

class Llama final : public Model {
 public:
  /// Throws a config error when the sizes do not fit together.
  explicit Llama(const LlamaOptions& options);

  ModelTraits traits() const override;
  std::vector<ParameterSpec> parameters() const override;
  void embed(ProgramBuilder& b) const override;
  void block(ProgramBuilder& b) const override;
  void head(ProgramBuilder& b) const override;
  std::string hf_config() const override;

 private:
  LlamaOptions o_;
  HeadLayout heads_;
  RopeFrequencies rope_;
};

}  // namespace quern::llama
