#include "image.h"

#include <png.h>
#include <turbojpeg.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>

#include "quern/error.h"

namespace quern::images {

namespace {

constexpr std::int64_t kLargestSide = 1 << 14;

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what, const std::string& found) {
  throw Error(ErrorCode::input,
              {.where = path.string(),
               .what = what,
               .found = found,
               .expected = "a PNG or JPEG of at most " + std::to_string(kLargestSide) + " pixels a side",
               .next = "repair or remove the file"});
}

std::vector<std::uint8_t> bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file ? static_cast<std::streamoff>(file.tellg()) : -1;
  if (size < 0) refuse(path, "cannot be read", "no file, or no permission");
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(size));
  file.seekg(0);
  if (!file.read(reinterpret_cast<char*>(bytes.data()), size))
    refuse(path, "cannot be read", "fewer bytes than its size");
  return bytes;
}

Image sized(const std::filesystem::path& path, std::int64_t height, std::int64_t width, std::int64_t channels) {
  if (height < 1 || width < 1 || height > kLargestSide || width > kLargestSide)
    refuse(path, "its size", std::to_string(width) + " x " + std::to_string(height));
  return {height, width, channels, std::vector<std::uint8_t>(static_cast<std::size_t>(height * width * channels))};
}

/// Luma of Rec. 601, as a JPEG has it.
std::uint8_t grey_of(const std::uint8_t* rgb) {
  return static_cast<std::uint8_t>((rgb[0] * 19595 + rgb[1] * 38470 + rgb[2] * 7471 + 0x8000) >> 16);
}

Image read_png(const std::filesystem::path& path, const std::vector<std::uint8_t>& bytes, std::int64_t channels) {
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  const std::unique_ptr<png_image, void (*)(png_image*)> end(&png, png_image_free);
  if (!png_image_begin_read_from_memory(&png, bytes.data(), bytes.size())) refuse(path, "no PNG", png.message);
  Image image = sized(path, png.height, png.width, channels);
  png.format = PNG_FORMAT_RGBA;  // not blended with anything
  png.flags |= PNG_IMAGE_FLAG_16BIT_sRGB;
  std::vector<std::uint8_t> all(static_cast<std::size_t>(4 * image.height * image.width));
  if (!png_image_finish_read(&png, nullptr, all.data(), 0, nullptr)) refuse(path, "a damaged PNG", png.message);
  for (std::size_t from = 0, to = 0; from < all.size(); from += 4) {
    const std::uint8_t* const pixel = all.data() + from;
    if (channels == 1)
      image.pixels[to++] = grey_of(pixel);
    else
      to = static_cast<std::size_t>(std::copy_n(pixel, 3, image.pixels.data() + to) - image.pixels.data());
  }
  return image;
}

Image read_jpeg(const std::filesystem::path& path, const std::vector<std::uint8_t>& bytes, std::int64_t channels) {
  const std::unique_ptr<void, int (*)(tjhandle)> jpeg(tjInitDecompress(), tjDestroy);
  if (!jpeg) fail_internal("data images", tjGetErrorStr2(nullptr));
  int width = 0, height = 0, sampling = 0, space = 0;
  if (tjDecompressHeader3(jpeg.get(), bytes.data(), bytes.size(), &width, &height, &sampling, &space) != 0)
    refuse(path, "no JPEG", tjGetErrorStr2(jpeg.get()));
  if (space == TJCS_CMYK || space == TJCS_YCCK) refuse(path, "a JPEG without red, green and blue", "four inks");
  Image image = sized(path, height, width, channels);
  if (tjDecompress2(jpeg.get(), bytes.data(), bytes.size(), image.pixels.data(), width, 0, height,
                    channels == 1 ? TJPF_GRAY : TJPF_RGB, TJFLAG_ACCURATEDCT | TJFLAG_STOPONWARNING) != 0)
    refuse(path, "a damaged JPEG", tjGetErrorStr2(jpeg.get()));
  return image;
}

double weight_of(Filter filter, double x) {
  x = std::fabs(x);
  if (filter == Filter::bilinear) return x < 1 ? 1 - x : 0;
  constexpr double a = -0.5;  // Keys' cubic convolution
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? ((x - 5) * x + 8) * x * a - 4 * a : 0;
}

/// Of each output pixel the input pixels that it is a weighted mean of.
struct Tap {
  std::int64_t first = 0;
  std::vector<float> weights;
};

std::vector<Tap> taps(double begin, double length, std::int64_t inputs, std::int64_t outputs, Filter filter) {
  const double scale = length / static_cast<double>(outputs), wide = std::max(scale, 1.0);
  const double support = (filter == Filter::bilinear ? 1 : 2) * wide;
  std::vector<Tap> all;
  for (std::int64_t i = 0; i < outputs; ++i) {
    const double centre = begin + (static_cast<double>(i) + 0.5) * scale;
    const auto low = std::clamp<std::int64_t>(std::llround(std::floor(centre - support + 0.5)), 0, inputs - 1);
    const auto high = std::clamp<std::int64_t>(std::llround(std::floor(centre + support + 0.5)), low + 1, inputs);
    Tap tap{low, {}};
    double sum = 0;
    for (std::int64_t at = low; at < high; ++at) {
      const double weight = weight_of(filter, (static_cast<double>(at) + 0.5 - centre) / wide);
      tap.weights.push_back(static_cast<float>(weight));
      sum += weight;
    }
    for (float& weight : tap.weights) weight = static_cast<float>(weight / sum);
    all.push_back(std::move(tap));
  }
  return all;
}

}  // namespace

Image read_image(const std::filesystem::path& path, std::int64_t channels) {
  const std::vector<std::uint8_t> bytes = bytes_of(path);
  constexpr std::uint8_t kPng[] = {0x89, 'P', 'N', 'G'}, kJpeg[] = {0xFF, 0xD8, 0xFF};
  auto begins = [&](const auto& mark) {
    return bytes.size() > std::size(mark) && std::equal(std::begin(mark), std::end(mark), bytes.begin());
  };
  if (begins(kPng)) return read_png(path, bytes, channels);
  if (begins(kJpeg)) return read_jpeg(path, bytes, channels);
  refuse(path, "neither PNG nor JPEG", std::to_string(bytes.size()) + " bytes of something else");
}

std::vector<float> resized(const Image& image, const Box& box, std::int64_t size, Filter filter) {
  const std::int64_t channels = image.channels;
  const std::vector<Tap> across = taps(box.left, box.width, image.width, size, filter);
  const std::vector<Tap> down = taps(box.top, box.height, image.height, size, filter);
  const std::int64_t top = down.front().first;
  const std::int64_t rows = down.back().first + static_cast<std::int64_t>(down.back().weights.size()) - top;
  std::vector<float> narrow(static_cast<std::size_t>(rows * size * channels));
  for (std::int64_t y = 0; y < rows; ++y)
    for (std::int64_t x = 0; x < size; ++x) {
      const Tap& tap = across[static_cast<std::size_t>(x)];
      const std::uint8_t* from = image.pixels.data() + ((top + y) * image.width + tap.first) * channels;
      float* to = narrow.data() + (y * size + x) * channels;
      for (const float weight : tap.weights)
        for (std::int64_t c = 0; c < channels; ++c) to[c] += weight * static_cast<float>(*from++);
    }
  std::vector<float> result(static_cast<std::size_t>(size * size * channels));
  for (std::int64_t y = 0; y < size; ++y) {
    const Tap& tap = down[static_cast<std::size_t>(y)];
    const float* from = narrow.data() + (tap.first - top) * size * channels;
    float* to = result.data() + y * size * channels;
    for (const float weight : tap.weights)
      for (std::int64_t i = 0; i < size * channels; ++i) to[i] += weight * *from++;
  }
  return result;
}

}  // namespace quern::images
