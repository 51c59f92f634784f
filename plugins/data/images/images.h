#pragma once
// Rows of a micro-batch that are images, cut into patches:
//   pixels (N - K B, channels patch patch) f32    positions (N), 0 to S - 1 in each row    targets (B), the class
//   weights (B) f32, if classes are balanced
// With pixels = "u8", pixels are bytes and pixel_scale (B, 2 channels) f32 has a factor and then a
// summand for each channel.
// S is the tokens of a row (train.sequence), of which the model adds the K that are no patches.
//
// An image's crop and flip depend on the seed and its number since the first epoch began, so a run that resumes, or has
// other threads, sees the same.

#include "folder.h"
#include "image.h"
#include "options.h"
#include "quern/data_source.h"

namespace quern::images {

class Images final : public Dataset {
 public:
  explicit Images(const Options& options);
  bool has(Split split) const override { return !(split == Split::train ? o_.train : o_.validation).empty(); }
  std::unique_ptr<DataSource> open(const DataRequest& request) const override;

 private:
  Options o_;
};

/// A random part of an image: `draws` are four numbers of 0 to 1.
Box random_crop(const Image& image, double smallest_area, const double* draws);
/// The square in the middle, whose side is this share of the shorter one.
Box middle(const Image& image, double share);
/// Row-major patches of (size, size, channels) values, each (channels, patch, patch): (v / 255 - mean) / deviation.
void cut_into_patches(const std::vector<float>& values, const Options& options, bool flipped, float* patches);
/// The values themselves, rounded.
void cut_into_patches(const std::vector<float>& values, const Options& options, bool flipped, std::uint8_t* patches);

}  // namespace quern::images
