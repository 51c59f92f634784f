#pragma once
// A vision transformer without a class token: patches of an image, full attention, the mean of all patches, a class.

#include "options.h"
#include "quern/model.h"

namespace patch_classifier {

class PatchClassifier final : public quern::Model {
 public:
  /// Throws a config error when the sizes do not fit together.
  explicit PatchClassifier(const Options& options);

  quern::ModelTraits traits() const override;
  std::vector<quern::ParameterSpec> parameters() const override;
  void embed(quern::ProgramBuilder& b) const override;
  void block(quern::ProgramBuilder& b, std::int64_t layer) const override;
  void head(quern::ProgramBuilder& b) const override;
  std::string hf_config() const override;

 private:
  Options o_;
  quern::HeadLayout heads_;
};

}  // namespace patch_classifier
