#pragma once
// A decoder whose attention and feed-forward read the same normed input and are added to the stream together (Wang and
// Komatsuzaki, GPT-J, 2021), with layer_norm, rotary positions and GELU.

#include "options.h"
#include "quern/model.h"

namespace parallel_decoder {

class ParallelDecoder final : public quern::Model {
 public:
  /// Throws a config error when the sizes do not fit together.
  explicit ParallelDecoder(const Options& options);

  quern::ModelTraits traits() const override;
  std::vector<quern::ParameterSpec> parameters() const override;
  void embed(quern::ProgramBuilder& b) const override;
  std::int64_t block_kind(std::int64_t layer) const override;
  void block(quern::ProgramBuilder& b, std::int64_t layer) const override;
  void head(quern::ProgramBuilder& b) const override;
  std::string hf_config() const override;

 private:
  Options o_;
  quern::HeadLayout heads_;
  quern::RopeFrequencies rope_;
};

}  // namespace parallel_decoder
