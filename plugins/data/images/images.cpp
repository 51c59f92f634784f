#include "images.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>

#include "quern/error.h"
#include "quern/random.h"
#include "quern/skipping_source.h"

namespace quern::images {

namespace {

[[noreturn]] void refuse(const std::string& key, const std::string& what, const std::string& found,
                         const std::string& expected) {
  throw Error(ErrorCode::config, {.where = key, .what = what, .found = found, .expected = expected});
}

/// What of(value, channel) makes of each value, patch by patch.
template <class T, class Of>
void cut(const std::vector<float>& values, const Options& options, bool flipped, T* patches, const Of& of) {
  const std::int64_t size = options.size, patch = options.patch, channels = options.channels;
  for (std::int64_t top = 0; top < size; top += patch)
    for (std::int64_t left = 0; left < size; left += patch)
      for (std::int64_t c = 0; c < channels; ++c)
        for (std::int64_t y = top; y < top + patch; ++y)
          for (std::int64_t x = left; x < left + patch; ++x) {
            const std::int64_t at = y * size + (flipped ? size - 1 - x : x);
            *patches++ = of(values[static_cast<std::size_t>(at * channels + c)], static_cast<std::size_t>(c));
          }
}

class Source final : public SkippingSource {
 public:
  Source(const Options& options, const DataRequest& request, Folder folder)
      : o_(options),
        geometry_(request.geometry),
        trains_(request.split == Split::train),
        seed_(request.seed),
        folder_(std::move(folder)),
        balance_(folder_.balance()) {
    const std::int64_t across = o_.size / o_.patch;
    patches_ = across * across;
    if (geometry_.sequence < patches_)
      refuse("train.sequence", "fewer tokens than an image has patches", std::to_string(geometry_.sequence),
             std::to_string(patches_) + ", and those that the model adds");
  }

  std::int64_t epoch_tokens() const override { return count() * geometry_.sequence; }

  void next(Batch& batch) override {
    batch = {};
    std::vector<float> weights;
    std::vector<std::int64_t> numbers;
    for (std::int64_t row = 0; row < geometry_.batch; ++row) {
      numbers.push_back(next_++);
      const Folder::Item& item = item_of(numbers.back());
      batch.targets.push_back(item.label);
      batch.names.push_back(folder_.classes[static_cast<std::size_t>(item.label)] + "/" +
                            item.path.filename().string());
      weights.push_back(balance_[static_cast<std::size_t>(item.label)]);
      for (std::int64_t i = 0; i < geometry_.sequence; ++i) batch.positions.push_back(static_cast<std::int32_t>(i));
    }
    o_.pixels == "u8" ? draw_pixels<std::uint8_t>(numbers, batch) : draw_pixels<float>(numbers, batch);
    if (o_.pixels == "u8") {
      std::vector<float> scale;
      for (std::int64_t row = 0; row < geometry_.batch; ++row)
        for (const bool factor : {true, false})
          for (std::size_t c = 0; c < static_cast<std::size_t>(o_.channels); ++c)
            scale.push_back(static_cast<float>(factor ? 1 / (255 * o_.deviation[c]) : -o_.mean[c] / o_.deviation[c]));
      batch.set("pixel_scale", std::span<const float>(scale));
    }
    if (o_.balanced) batch.set("weights", std::span<const float>(weights));
  }

  void skip(std::int64_t batches) override { next_ += batches * geometry_.batch; }

  std::string save_state() const override {
    return "images " + std::to_string(next_) + " of " + std::to_string(digest());
  }

  void load_state(const std::string& state) override {
    std::istringstream text(state);
    std::string images, of;
    std::int64_t next = -1;
    std::uint64_t is = 0;
    const bool read =
        static_cast<bool>(text >> images >> next >> of >> is) && images == "images" && of == "of" && next >= 0;
    const bool same = read && is == digest();
    if (!same)
      throw Error(
          ErrorCode::input,
          {.where = "data.images",
           .what = read ? "the folder has other images, or train.seed is another, than when the position was saved"
                        : "not a saved position",
           .found = read ? std::to_string(count()) + " images" : state.substr(0, 60),
           .expected = read ? "the same files" : "\"images NUMBER of DIGEST\"",
           .next = "give the folder of the run, or start another run"});
    next_ = next;
  }

 private:
  /// Of the images and, where they are drawn at random, the seed.
  std::uint64_t digest() const { return folder_.digest() ^ (trains_ ? seed_ * 0x9E3779B97F4A7C15u : 0); }
  std::int64_t count() const { return static_cast<std::int64_t>(folder_.items.size()); }

  /// Validation comes in the folder's order.
  const Folder::Item& item_of(std::int64_t number) {
    if (!trains_) return folder_.items[static_cast<std::size_t>(number % count())];
    const std::int64_t epoch = number / count();
    for (Epoch& known : epochs_)
      if (known.number == epoch)
        return folder_.items[static_cast<std::size_t>(known.order[static_cast<std::size_t>(number % count())])];
    std::swap(epochs_[0], epochs_[1]);  // a micro-batch may be of two
    epochs_[0] = {epoch, order_of_epoch(count(), seed_, epoch)};
    return item_of(number);
  }

  template <class T>
  void draw_pixels(const std::vector<std::int64_t>& numbers, Batch& batch) {
    const std::int64_t values = patches_ * o_.channels * o_.patch * o_.patch;
    std::vector<T> pixels(static_cast<std::size_t>(geometry_.batch * values));
    std::vector<const Folder::Item*> items;
    for (const std::int64_t number : numbers) items.push_back(&item_of(number));
    in_threads(geometry_.batch, [&](std::int64_t row) {
      const auto at = static_cast<std::size_t>(row);
      draw(*items[at], numbers[at], pixels.data() + row * values);
    });
    batch.set("pixels", std::span<const T>(pixels));
  }

  template <class T>
  void draw(const Folder::Item& item, std::int64_t number, T* patches) const {
    const Image image = read_image(item.path, o_.channels);
    double draws[8];
    for (std::uint64_t i = 0; i < 8; ++i)
      draws[i] = (random_word({seed_, RandomPurpose::sample, 0}, static_cast<std::uint32_t>(number >> 32),
                              8 * static_cast<std::uint64_t>(number & 0xFFFFFFFF) + i) +
                  0.5) *
                 0x1p-32;
    const Box box =
        trains_ && o_.smallest_area < 1 ? random_crop(image, o_.smallest_area, draws) : middle(image, o_.crop);
    const Filter filter = o_.interpolation == "bilinear" ? Filter::bilinear : Filter::bicubic;
    cut_into_patches(resized(image, box, o_.size, filter), o_, trains_ && draws[4] < o_.flip, patches);
  }

  /// work(i) for all i; throws the fault of the first row that has one.
  template <class Work>
  void in_threads(std::int64_t count, const Work& work) const {
    const std::int64_t all = o_.threads > 0 ? o_.threads : std::max(1u, std::thread::hardware_concurrency());
    std::atomic<std::int64_t> next{0};
    std::mutex mutex;
    std::int64_t failed = std::numeric_limits<std::int64_t>::max();
    std::exception_ptr fault;
    auto run = [&] {
      for (std::int64_t i = next++; i < count; i = next++) try {
          work(i);
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (i < failed) failed = i, fault = std::current_exception();
        }
    };
    {
      std::vector<std::jthread> threads;
      for (std::int64_t i = 1; i < std::min(all, count); ++i) threads.emplace_back(run);
      run();
    }
    if (fault) std::rethrow_exception(fault);
  }

  struct Epoch {
    std::int64_t number = -1;
    std::vector<std::int64_t> order = {};
  };
  Options o_;
  Geometry geometry_;
  bool trains_;
  std::uint64_t seed_;
  Folder folder_;
  std::vector<float> balance_;
  std::int64_t patches_ = 0, next_ = 0;
  Epoch epochs_[2];
};

}  // namespace

Box random_crop(const Image& image, double smallest_area, const double* draws) {
  const auto height = static_cast<double>(image.height), width = static_cast<double>(image.width);
  const double area = height * width * (smallest_area + (1 - smallest_area) * draws[0]);
  const double ratio = std::exp(std::log(3.0 / 4) + std::log(16.0 / 9) * draws[1]);  // of width to height
  const double tall = std::min(height, std::sqrt(area / ratio)), wide = std::min(width, std::sqrt(area * ratio));
  return {.top = (height - tall) * draws[2], .left = (width - wide) * draws[3], .height = tall, .width = wide};
}

Box middle(const Image& image, double share) {
  const auto height = static_cast<double>(image.height), width = static_cast<double>(image.width);
  const double side = share * std::min(height, width);
  return {.top = (height - side) / 2, .left = (width - side) / 2, .height = side, .width = side};
}

void cut_into_patches(const std::vector<float>& values, const Options& options, bool flipped, float* patches) {
  cut(values, options, flipped, patches, [&](float value, std::size_t c) {
    return (value / 255.0f - static_cast<float>(options.mean[c])) / static_cast<float>(options.deviation[c]);
  });
}

void cut_into_patches(const std::vector<float>& values, const Options& options, bool flipped, std::uint8_t* patches) {
  cut(values, options, flipped, patches,
      [](float value, std::size_t) { return static_cast<std::uint8_t>(std::lround(std::clamp(value, 0.0f, 255.0f))); });
}

Images::Images(const Options& options) : o_(options) {
  if (o_.channels == 2) refuse("data.images.channels", "neither colour nor grey", "2", "1 or 3");
  if (o_.size % o_.patch != 0)
    refuse("data.images.size", "does not divide into patches", std::to_string(o_.size),
           "a multiple of " + std::to_string(o_.patch) + ", patch");
  for (const auto& [key, values] : {std::pair("mean", o_.mean), std::pair("deviation", o_.deviation)})
    if (static_cast<std::int64_t>(values.size()) < o_.channels)
      refuse(std::string("data.images.") + key, "fewer numbers than channels", std::to_string(values.size()),
             std::to_string(o_.channels));
  for (const double deviation : o_.deviation)
    if (!(deviation > 0))
      refuse("data.images.deviation", "is divided by", std::to_string(deviation), "numbers above 0");
}

std::unique_ptr<DataSource> Images::open(const DataRequest& request) const {
  if (request.documents) refuse("data.documents", "images have no documents", "\"masked\"", "\"joined\"");
  Folder folder = read_folder(o_.train);
  if (request.split == Split::validation) folder = read_folder(o_.validation, folder.classes);
  return std::make_unique<Source>(o_, request, std::move(folder));
}

}  // namespace quern::images
