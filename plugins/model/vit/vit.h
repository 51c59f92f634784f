#pragma once
// Vision transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020), as timm's VisionTransformer: patches
// of an image, a class token, learned positions, layer norms before attention and feed-forward, a class for each image.
// Weights have timm's names. Layer scale, register tokens, q and k norms, dropout and drop path are not there.

#include "options.h"
#include "quern/model.h"

namespace quern::vit {

class Vit final : public Model {
 public:
  /// Throws a config error when the sizes do not fit together.
  explicit Vit(const Options& options);

  ModelTraits traits() const override;
  std::vector<ParameterSpec> parameters() const override;
  /// Reads "pixels" f32: of each patch (in_chans, patch_size, patch_size) values, row-major; (N - B) of them, N without
  /// a class token. Patches come row by row.
  void embed(ProgramBuilder& b) const override;
  void block(ProgramBuilder& b, std::int64_t layer) const override;
  /// Reads "targets" (B), and "weights" (B) f32 where images have weights.
  void head(ProgramBuilder& b) const override;
  std::string hf_config() const override;

 private:
  std::int64_t prefix() const { return o_.class_token ? 1 : 0; }
  std::int64_t tokens() const { return prefix() + patches_ * patches_; }
  std::int64_t patch_values() const { return o_.in_chans * o_.patch_size * o_.patch_size; }

  Options o_;
  HeadLayout heads_;
  std::int64_t patches_ = 0, hidden_ = 0;  // patches of a row of the image; width of the feed-forward layer
  std::string pooled_norm_;
};

}  // namespace quern::vit
