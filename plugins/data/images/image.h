#pragma once
// Images in memory: decoding of PNG and JPEG, and a crop resized to a square. Files are untrusted: whatever their
// bytes, an image is read, or refused by an input error that names the file.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace quern::images {

/// (height, width, channels), values 0 to 255.
struct Image {
  std::int64_t height = 0, width = 0, channels = 0;
  std::vector<std::uint8_t> pixels;
};

/// `channels` 3 or 1, whatever the file has; an alpha channel is over black. At most 2^14 pixels a side.
Image read_image(const std::filesystem::path& path, std::int64_t channels);

/// A part of an image, in pixels; its edges may be between pixels.
struct Box {
  double top = 0, left = 0, height = 0, width = 0;
};

enum class Filter { bilinear, bicubic };

/// The box resized to (size, size, channels), values 0 to 255 (bicubic beyond). Each output pixel is a weighted mean of
/// those that the filter covers; a filter is as wide as the box shrinks, as in Pillow's `resize`.
std::vector<float> resized(const Image& image, const Box& box, std::int64_t size, Filter filter);

}  // namespace quern::images
