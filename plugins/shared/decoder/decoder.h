#pragma once
// A decoder-only transformer, written from its description: attention and feed-forward branches around a residual
// stream. All families of models share it (family.h).

#include "quern/model.h"
#include "shared/decoder/description.h"

namespace quern::decoder {

class Decoder : public Model {
 public:
  explicit Decoder(Description description);

  ModelTraits traits() const override;
  std::vector<ParameterSpec> parameters() const override;
  void embed(ProgramBuilder& b) const override;
  std::int64_t block_kind(std::int64_t layer) const override { return d_.form(layer); }
  void block(ProgramBuilder& b, std::int64_t layer) const override;
  void head(ProgramBuilder& b) const override;

 private:
  /// `x` itself where the description has no such norm.
  ValueId norm(ProgramBuilder& b, ValueId x, const std::string& hf_name, const std::string& name) const;
  ValueId rotated(ProgramBuilder& b, ValueId qkv, const LayerForm& form) const;
  ValueId activation(ProgramBuilder& b, ValueId x) const;

  Description d_;
  std::vector<std::int32_t> head_order_;  ///< of the stored rows of a query or key head; empty: the tensor's
};

}  // namespace quern::decoder
