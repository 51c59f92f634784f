#pragma once
// A decoder of the Llama shape: norm, grouped-query attention with rotary positions, norm, gated feed-forward. Families
// differ by where they have biases; a plugin states that, its options and its config.json.

#include <string>

#include "quern/decoder.h"
#include "quern/model.h"

namespace quern::decoder {

/// Which projections of a block have a bias.
struct Biases {
  bool qkv = false, o = false;
  bool gate_up = false, down = false;
};

class Decoder : public Model {
 public:
  /// Throws a config error, naming `family`, when the sizes do not fit together.
  Decoder(const DecoderOptions& options, const Biases& biases, const std::string& family);

  ModelTraits traits() const override;
  std::vector<ParameterSpec> parameters() const override;
  void embed(ProgramBuilder& b) const override;
  void block(ProgramBuilder& b) const override;
  void head(ProgramBuilder& b) const override;

 private:
  DecoderOptions o_;
  Biases biases_;
  HeadLayout heads_;
  RopeFrequencies rope_;
};

}  // namespace quern::decoder
