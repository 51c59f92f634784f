#pragma once
// A decoder-only transformer, written from its description: attention and feed-forward branches around a residual
// stream. All families of models share it (family.h).

#include "quern/model.h"
#include "shared/decoder/description.h"

namespace quern::decoder {

class Decoder : public Model {
 public:
  explicit Decoder(Description description) : d_(std::move(description)) {}

  ModelTraits traits() const override;
  std::vector<ParameterSpec> parameters() const override;
  void embed(ProgramBuilder& b) const override;
  void block(ProgramBuilder& b) const override;
  void head(ProgramBuilder& b) const override;

 private:
  /// `x` itself where the description has no such norm.
  ValueId norm(ProgramBuilder& b, ValueId x, const std::string& hf_name, const std::string& name) const;

  Description d_;
};

}  // namespace quern::decoder
