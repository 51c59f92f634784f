// Images that are drawn, for trying an image model without files: in noise, one bright figure of four kinds, which is
// the label. A row of a micro-batch is an image, cut into `sequence` patches of 4 x 4 pixels, four patches wide.
//
//   pixels (N, 16) f32, a patch each    positions (N), of patches    targets (B), the figure: 0 to 3
#include <cmath>

#include "quern/error.h"
#include "quern/plugin.h"
#include "quern/random.h"

namespace {

using namespace quern;

constexpr std::int64_t kPatch = 4, kPatchesAcross = 4, kPixels = kPatch * kPatch;

struct Options {
  std::int64_t images = 4096;
  double noise = 0.3;
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("images", &Options::images, "images of an epoch; validation has an eighth of that")
      .at_least(8)
      .at_most(1 << 30);
  t.add("noise", &Options::noise, "standard deviation of the noise in each pixel").at_least(0).at_most(10);
  return t;
}

/// Whether the figure covers a point, from -1 to 1 in both directions around its centre.
bool covers(int figure, double x, double y) {
  switch (figure) {
    case 0: return std::fabs(x) < 1 && std::fabs(y) < 1;                 // a square
    case 1: return std::fabs(x) < 0.35 || std::fabs(y) < 0.35;           // a cross
    case 2: return std::fabs(x * x + y * y - 0.7) < 0.35;                // a ring
    default: return std::fabs(x - y) < 0.45 || std::fabs(x + y) < 0.45;  // an X
  }
}

class Source final : public DataSource {
 public:
  Source(const Options& options, const DataRequest& request)
      : options_(options),
        geometry_(request.geometry),
        images_(request.split == Split::train ? options.images : (options.images + 7) / 8),
        // Validation images are the same in every run, and none that training has.
        key_{request.split == Split::train ? request.seed : ~std::uint64_t{0}, RandomPurpose::sample,
             request.split == Split::train ? 1u : 2u} {}

  std::int64_t epoch_tokens() const override { return images_ * geometry_.sequence; }

  void next(Batch& batch) override {
    batch = {};
    pixels_.clear();
    for (std::int64_t row = 0; row < geometry_.batch; ++row, ++next_) draw(next_ % images_, batch);
    batch.set("pixels", std::span<const float>(pixels_));
  }

  std::string save_state() const override { return std::to_string(next_); }
  void load_state(const std::string& state) override {
    std::size_t read = 0;
    const bool digits = !state.empty() && state.size() < 19 && state.find_first_not_of("0123456789") == state.npos;
    if (digits) next_ = std::stoll(state, &read);
    if (!digits || read != state.size())
      throw Error(ErrorCode::input, {.where = "data drawn_shapes",
                                     .what = "not a saved position",
                                     .found = state.substr(0, 40),
                                     .expected = "the number of an image"});
  }

 private:
  double uniform(std::int64_t image, std::uint64_t place) const {
    return (random_word(key_, static_cast<std::uint32_t>(image), place) + 0.5) * 0x1p-32;
  }

  void draw(std::int64_t image, Batch& batch) {
    const int figure = static_cast<int>(uniform(image, 0) * 4);
    const double height = static_cast<double>((geometry_.sequence + kPatchesAcross - 1) / kPatchesAcross * kPatch);
    const double width = kPatchesAcross * kPatch, radius = 2.5 + 2 * uniform(image, 1);
    const double x0 = radius + (width - 2 * radius) * uniform(image, 2);
    const double y0 = height > 2 * radius ? radius + (height - 2 * radius) * uniform(image, 3) : height / 2;
    for (std::int64_t patch = 0; patch < geometry_.sequence; ++patch) {
      batch.positions.push_back(static_cast<std::int32_t>(patch));
      for (std::int64_t i = 0; i < kPixels; ++i) {
        const double x = static_cast<double>(patch % kPatchesAcross * kPatch + i % kPatch) + 0.5 - x0;
        const double y = static_cast<double>(patch / kPatchesAcross * kPatch + i / kPatch) + 0.5 - y0;
        const bool inside = std::max(std::fabs(x), std::fabs(y)) < radius && covers(figure, x / radius, y / radius);
        // Box and Muller's two uniform numbers of a normal one.
        const auto place = static_cast<std::uint64_t>(8 + 2 * (patch * kPixels + i));
        const double normal =
            std::sqrt(-2 * std::log(uniform(image, place))) * std::cos(6.28318530717958648 * uniform(image, place + 1));
        pixels_.push_back(static_cast<float>((inside ? 1.0 : -1.0) + options_.noise * normal));
      }
    }
    batch.targets.push_back(figure);
    batch.names.push_back("image " + std::to_string(image));
  }

  Options options_;
  Geometry geometry_;
  std::int64_t images_, next_ = 0;
  RandomKey key_;
  std::vector<float> pixels_;
};

class DrawnShapes final : public Dataset {
 public:
  explicit DrawnShapes(const Options& options) : options_(options) {}
  bool has(Split) const override { return true; }
  std::unique_ptr<DataSource> open(const DataRequest& request) const override {
    if (request.documents)
      throw Error(ErrorCode::config, {.where = "data drawn_shapes",
                                      .what = "images have no documents",
                                      .next = "set data.documents = \"joined\""});
    return std::make_unique<Source>(options_, request);
  }

 private:
  Options options_;
};

}  // namespace

QUERN_PLUGIN("data", "drawn_shapes", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Dataset>(
      "drawn_shapes", "drawn images of four figures, as patches", options().specs(),
      [](const OptionValues& values) { return std::make_unique<DrawnShapes>(options().bind(values)); });
}
