#include "images.h"

#include <png.h>
#include <turbojpeg.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "quern/error.h"
#include "quern/random.h"
#include "quern/run.h"
#include "quern/skipping_source.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using namespace quern::images;
using testkit::check_refused;

namespace fs = std::filesystem;

namespace {

Image image_of(std::int64_t height, std::int64_t width, std::int64_t channels, std::uint32_t seed = 0) {
  Image image{height, width, channels, {}};
  for (std::int64_t i = 0; i < height * width * channels; ++i)
    image.pixels.push_back(
        static_cast<std::uint8_t>(random_word({7, RandomPurpose::sample, seed}, 0, static_cast<std::uint64_t>(i))));
  return image;
}

void write_png(const fs::path& path, const Image& image) {
  fs::create_directories(path.parent_path());
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  png.width = static_cast<png_uint_32>(image.width), png.height = static_cast<png_uint_32>(image.height);
  png.format = image.channels == 1 ? PNG_FORMAT_GRAY : image.channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_RGBA;
  REQUIRE(png_image_write_to_file(&png, path.c_str(), 0, image.pixels.data(), 0, nullptr));
}

void write_jpeg(const fs::path& path, const Image& image) {
  fs::create_directories(path.parent_path());
  const std::unique_ptr<void, int (*)(tjhandle)> jpeg(tjInitCompress(), tjDestroy);
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  REQUIRE(tjCompress2(jpeg.get(), image.pixels.data(), static_cast<int>(image.width), 0, static_cast<int>(image.height),
                      image.channels == 1 ? TJPF_GRAY : TJPF_RGB, &bytes, &size,
                      image.channels == 1 ? TJSAMP_GRAY : TJSAMP_444, 100, 0) == 0);
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes), static_cast<std::streamsize>(size));
  tjFree(bytes);
}

/// A bright figure on a dark ground of any colour: a yellow or cyan disc or cross.
Image figure(int kind, std::uint32_t number) {
  constexpr std::int64_t kSide = 24;
  const RandomKey key{11, RandomPurpose::sample, number};
  auto uniform = [&](std::uint64_t i) { return (random_word(key, 0, i) + 0.5) * 0x1p-32; };
  const double radius = 5 + 3 * uniform(0);
  const double x0 = radius + (kSide - 2 * radius) * uniform(1), y0 = radius + (kSide - 2 * radius) * uniform(2);
  Image image{kSide, kSide, 3, {}};
  for (std::int64_t i = 0; i < kSide * kSide; ++i) {
    const double x = (static_cast<double>(i % kSide) + 0.5 - x0) / radius;
    const double y = (static_cast<double>(i / kSide) + 0.5 - y0) / radius;
    const double edge = std::max(std::fabs(x), std::fabs(y));
    const bool inside = kind % 2 == 0 ? x * x + y * y < 1 : edge < 1 && std::min(std::fabs(x), std::fabs(y)) < 0.3;
    for (int c = 0; c < 3; ++c) {
      const bool bright = inside && (c == 1 || c == (kind < 2 ? 0 : 2));  // yellow or cyan
      image.pixels.push_back(
          static_cast<std::uint8_t>(20 + 80 * uniform(6 + static_cast<std::uint64_t>(c)) + (bright ? 130 : 0)));
    }
  }
  return image;
}

void draw_figures(const fs::path& folder, int each, std::uint32_t first) {
  for (int kind = 0; kind < 4; ++kind)
    for (int i = 0; i < each; ++i)
      write_png(folder / std::vector<std::string>{"yellow_disc", "yellow_cross", "cyan_disc", "cyan_cross"}[kind] /
                    (std::to_string(i) + ".png"),
                figure(kind, first + static_cast<std::uint32_t>(4 * i + kind)));
}

DataRequest request_of(Geometry geometry, std::uint64_t seed = 5, Split split = Split::train) {
  return {.split = split, .geometry = geometry, .seed = seed};
}

Options options_for(const fs::path& train) {
  Options options;
  options.train = train.string();
  options.size = 8, options.patch = 4;
  return options;
}

std::vector<std::byte> pixels_of(DataSource& source) {
  Batch batch;
  source.next(batch);
  return batch.inputs.at("pixels");
}

}  // namespace

TEST_CASE("PNG keeps every pixel, JPEG almost, and colour becomes grey where that is wanted") {
  const TestDirectory folder;
  const fs::path png = fs::path(folder.path()) / "x" / "a.png", jpeg = fs::path(folder.path()) / "x" / "b.JPG";
  const Image colour = image_of(5, 7, 3), grey = image_of(6, 3, 1);
  write_png(png, colour);
  CHECK(read_image(png, 3).pixels == colour.pixels);
  CHECK(read_image(png, 1).channels == 1);
  REQUIRE(read_image(png, 1).pixels.size() == 35);
  for (std::size_t i = 0; i < 35; ++i) {
    const std::uint8_t* const rgb = &colour.pixels[3 * i];
    CHECK(std::abs(read_image(png, 1).pixels[i] - (0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2])) < 1);
  }
  write_png(png, grey);
  const Image three = read_image(png, 3);
  for (std::size_t i = 0; i < three.pixels.size(); ++i) REQUIRE(three.pixels[i] == grey.pixels[i / 3]);
  Image clear = image_of(2, 2, 4);
  clear.pixels[3] = 0, clear.pixels[7] = 255;
  write_png(png, clear);
  for (std::size_t i = 0; i < 12; ++i)  // transparent or not
    CHECK(read_image(png, 3).pixels[i] == clear.pixels[i / 3 * 4 + i % 3]);
  const Image smooth = figure(1, 3);
  write_jpeg(jpeg, smooth);
  const Image read = read_image(jpeg, 3);
  REQUIRE(read.pixels.size() == smooth.pixels.size());
  for (std::size_t i = 0; i < read.pixels.size(); ++i) REQUIRE(std::abs(read.pixels[i] - smooth.pixels[i]) <= 12);
}

TEST_CASE("damaged files are refused by name, wherever they are cut and whatever byte changed") {
  const TestDirectory folder;
  const fs::path path = fs::path(folder.path()) / "x" / "a.png";
  for (const bool png : {true, false}) {
    const Image image = figure(2, 9);
    png ? write_png(path, image) : write_jpeg(path, image);
    std::ifstream file(path, std::ios::binary);
    const std::string whole((std::istreambuf_iterator<char>(file)), {});
    for (std::size_t cut = 0; cut < whole.size() * 7 / 8; cut += whole.size() / 16) {
      std::ofstream(path, std::ios::binary) << whole.substr(0, cut);
      check_refused(ErrorCode::input, {"a.png"}, [&] { read_image(path, 3); });
    }
    for (std::size_t at = 0; at < whole.size(); at += 7) {
      std::string changed = whole;
      changed[at] = static_cast<char>(changed[at] ^ 0x55);
      std::ofstream(path, std::ios::binary) << changed;
      try {
        read_image(path, 3);  // a changed pixel of a JPEG may pass
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::input);
      }
    }
  }
  std::ofstream(path) << "GIF89a and so on";
  check_refused(ErrorCode::input, {"a.png", "neither PNG nor JPEG"}, [&] { read_image(path, 3); });
}

TEST_CASE("resizing keeps constants and straight slopes, and an image of the same size") {
  for (const Filter filter : {Filter::bilinear, Filter::bicubic}) {
    const Image image = image_of(6, 6, 3);
    const std::vector<float> same = resized(image, {0, 0, 6, 6}, 6, filter);
    for (std::size_t i = 0; i < same.size(); ++i) CHECK(same[i] == doctest::Approx(image.pixels[i]));
    Image slope{40, 40, 1, {}};
    for (std::int64_t i = 0; i < 1600; ++i) slope.pixels.push_back(static_cast<std::uint8_t>(4 * (i % 40) + i / 40));
    for (const std::int64_t size : {5, 10, 33}) {
      const Box box{8, 7.5, 20, 24};
      const std::vector<float> got = resized(slope, box, size, filter);
      for (std::int64_t y = 0; y < size; ++y)
        for (std::int64_t x = 0; x < size; ++x) {
          const double at_x = box.left + (static_cast<double>(x) + 0.5) * box.width / static_cast<double>(size) - 0.5;
          const double at_y = box.top + (static_cast<double>(y) + 0.5) * box.height / static_cast<double>(size) - 0.5;
          CHECK(got[static_cast<std::size_t>(y * size + x)] == doctest::Approx(4 * at_x + at_y).epsilon(0.01));
        }
    }
  }
}

TEST_CASE("crops are within the image and have the areas and ratios that they should") {
  const Image image = image_of(30, 50, 1);
  double smallest = 1, largest = 0;
  for (std::uint32_t i = 0; i < 500; ++i) {
    double draws[4];
    for (std::uint64_t d = 0; d < 4; ++d) draws[d] = (random_word({3, RandomPurpose::sample, i}, 0, d) + 0.5) * 0x1p-32;
    const Box box = random_crop(image, 0.1, draws);
    REQUIRE(box.top >= 0);
    REQUIRE(box.left >= 0);
    REQUIRE(box.top + box.height <= 30 + 1e-9);
    REQUIRE(box.left + box.width <= 50 + 1e-9);
    const double area = box.height * box.width / 1500;
    smallest = std::min(smallest, area), largest = std::max(largest, area);
    if (box.height < 30 && box.width < 50) {
      CHECK(box.width / box.height > 0.749);
      CHECK(box.width / box.height < 1.334);
    }
  }
  CHECK(smallest < 0.13);
  CHECK(largest > 0.7);
}

TEST_CASE("patches are row by row, channel by channel, and a flip exchanges left and right") {
  Options options;
  options.size = 4, options.patch = 2, options.mean = {0, 0.5, 0}, options.deviation = {1, 1, 2};
  std::vector<float> values;
  for (int i = 0; i < 4 * 4 * 3; ++i) values.push_back(static_cast<float>(255 * i));
  for (const bool flipped : {false, true}) {
    std::vector<float> patches(48);
    cut_into_patches(values, options, flipped, patches.data());
    for (int p = 0; p < 4; ++p)
      for (int c = 0; c < 3; ++c)
        for (int at = 0; at < 4; ++at) {
          const int y = p / 2 * 2 + at / 2, x = p % 2 * 2 + at % 2, from = flipped ? 3 - x : x;
          const auto value = static_cast<float>((y * 4 + from) * 3 + c);
          CHECK(patches[static_cast<std::size_t>(p * 12 + c * 4 + at)] == (c == 0   ? value
                                                                           : c == 1 ? value - 0.5f
                                                                                    : value / 2));
        }
  }
}

TEST_CASE("bytes, scaled, are the numbers to half a step, in a quarter of the bytes") {
  const TestDirectory folder;
  draw_figures(folder.path(), 3, 0);
  Options options = options_for(folder.path());
  options.mean = {0.2, 0.5, 0.6}, options.deviation = {0.5, 0.25, 1};
  Batch numbers, bytes;
  Images(options).open(request_of({5, 5}))->next(numbers);
  options.pixels = "u8";
  Images(options).open(request_of({5, 5}))->next(bytes);
  const auto& pixels = bytes.inputs.at("pixels");
  REQUIRE(4 * pixels.size() == numbers.inputs.at("pixels").size());
  REQUIRE(bytes.inputs.at("pixel_scale").size() == 5 * 6 * sizeof(float));
  const auto* want = reinterpret_cast<const float*>(numbers.inputs.at("pixels").data());
  const auto* scale = reinterpret_cast<const float*>(bytes.inputs.at("pixel_scale").data());
  for (std::size_t i = 0; i < pixels.size(); ++i) {
    const std::size_t channel = i % 48 / 16;
    // Values beyond 0 to 255, which bicubic resizing gives at edges, end there.
    const double least = -options.mean[channel] / options.deviation[channel];
    const double fair = std::clamp<double>(want[i], least, least + 1 / options.deviation[channel]);
    const double got = static_cast<double>(std::to_integer<int>(pixels[i])) * static_cast<double>(scale[channel]) +
                       static_cast<double>(scale[3 + channel]);
    REQUIRE(std::fabs(got - fair) <= 0.501 / 255 / options.deviation[channel]);
  }
}

TEST_CASE("an order has each image once, and is of its seed and epoch") {
  const std::vector<std::int64_t> order = order_of_epoch(100, 5, 3);
  std::vector<std::int64_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (std::int64_t i = 0; i < 100; ++i) REQUIRE(sorted[static_cast<std::size_t>(i)] == i);
  CHECK(order == order_of_epoch(100, 5, 3));
  CHECK(order != order_of_epoch(100, 5, 4));
  CHECK(order != order_of_epoch(100, 6, 3));
}

TEST_CASE("a folder that is named as an image, and images of other formats, are refused") {
  const TestDirectory folder;
  const fs::path own = fs::path(folder.path()) / "x";
  write_png(own / "a.png", image_of(4, 4, 3));
  CHECK(read_folder(folder.path(), {}).items.size() == 1);
  std::ofstream(own / "notes.txt") << "passed over";
  CHECK(read_folder(folder.path(), {}).items.size() == 1);
  fs::create_directory(own / "b.png");
  check_refused(ErrorCode::input, {"b.png", "no regular file"}, [&] { read_folder(folder.path(), {}); });
  fs::remove(own / "b.png");
  std::ofstream(own / "c.WebP") << "RIFF";
  check_refused(ErrorCode::input, {"c.WebP", "another format", "convert it"}, [&] { read_folder(folder.path(), {}); });
}

TEST_CASE("a source goes on where it was saved, with any number of threads, and skips as it reads") {
  const TestDirectory folder;
  draw_figures(folder.path(), 3, 0);
  Options options = options_for(folder.path());
  options.balanced = true;
  const DataRequest request = request_of({5, 5});
  const auto whole = Images(options).open(request);
  std::vector<std::vector<std::byte>> batches;
  for (int i = 0; i < 6; ++i) batches.push_back(pixels_of(*whole));  // more than two epochs of 12 images
  CHECK(batches[0] != batches[1]);
  const auto first = Images(options).open(request);
  for (int i = 0; i < 2; ++i) pixels_of(*first);
  const std::string position = first->save_state();
  options.threads = 3;
  const auto second = Images(options).open(request);
  second->load_state(position);
  for (std::size_t i = 2; i < 6; ++i) CHECK(pixels_of(*second) == batches[i]);
  second->load_state(position);
  skip(*second, 2);
  CHECK(pixels_of(*second) == batches[4]);
  CHECK(pixels_of(*Images(options).open(request_of({5, 5}, 6))) != batches[0]);

  check_refused(ErrorCode::input, {"data.images", "not a saved position"}, [&] { second->load_state("images x"); });
  fs::rename(fs::path(folder.path()) / "yellow_disc" / "0.png", fs::path(folder.path()) / "yellow_disc" / "7.png");
  check_refused(ErrorCode::input, {"data.images", "other images"},
                [&] { Images(options).open(request)->load_state(position); });
}

TEST_CASE("rows say what they are, classes are the folders in order, and small classes weigh more") {
  const TestDirectory folder;
  const fs::path train = fs::path(folder.path()) / "train", validation = fs::path(folder.path()) / "validation";
  for (int i = 0; i < 3; ++i) write_png(train / "cats" / (std::to_string(i) + ".png"), image_of(9, 9, 3));
  write_jpeg(train / "dogs.jpg", image_of(9, 9, 3));  // no class
  write_png(train / "dogs" / "a.png", image_of(9, 9, 3));
  write_png(validation / "cats" / "b.png", image_of(9, 9, 3));
  Options options = options_for(train);
  options.balanced = true;
  Batch batch;
  const auto source = Images(options).open(request_of({4, 5}));
  CHECK(source->epoch_tokens() == 20);
  source->next(batch);
  std::vector<float> weights(4);
  std::memcpy(weights.data(), batch.inputs.at("weights").data(), 16);
  CHECK(batch.positions == std::vector<std::int32_t>{0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4});
  for (std::size_t row = 0; row < 4; ++row) {
    const bool dog = batch.names[row] == "dogs/a.png";
    CHECK(batch.targets[row] == (dog ? 1 : 0));
    CHECK(weights[row] == doctest::Approx(dog ? 2.0 : 2.0 / 3));
  }
  options.validation = validation.string();
  check_refused(ErrorCode::input, {"validation", "other classes", "1 classes: cats", "2 classes: cats, dogs"}, [&] {
    Images(options).open(request_of({4, 5}, 5, Split::validation));
  });
  check_refused(ErrorCode::config, {"train.sequence", "3", "4"}, [&] { Images(options).open(request_of({4, 3})); });
  fs::remove(train / "dogs" / "a.png");
  check_refused(ErrorCode::input, {"dogs", "a class without images"}, [&] {
    Images(options).open(request_of({4, 5}));
  });
}

TEST_CASE("a small vision transformer tells drawn figures apart") {
  const TestDirectory folder;
  const fs::path root = folder.path();
  draw_figures(root / "train", 200, 0);
  draw_figures(root / "validation", 16, 100000);
  const std::string config = R"(
[model]
id = "vit"
[model.vit]
img_size = 24
patch_size = 6
embed_dim = 48
depth = 2
num_heads = 3
num_classes = 4
[data]
id = "images"
[data.images]
train = ")" + (root / "train").string() +
                             R"("
validation = ")" + (root / "validation").string() +
                             R"("
size = 24
patch = 6
smallest_area = 0.7
crop = 1.0
[train]
steps = 500
micro_batch = 32
sequence = 17
[optimizer]
learning_rate = 4e-3
[schedule]
id = "cosine"
[schedule.cosine]
warmup = 30
final = 0.05
[precision]
id = "fp32"
[log]
directory = ")" + (root / "run").string() +
                             "\"\nsinks = [\"jsonl\"]\n[checkpoint]\nexport = false\n";
  CHECK_THROWS_WITH_AS(
      TrainingRun(
          RunConfig{.file = "run.toml", .text = config, .overrides = {"data.images.size=12", "train.sequence=5"}}),
      doctest::Contains("fewer tokens than each sequence of the model has"), Error);
  RunRequests requests;
  TrainingRun run(RunConfig{.file = "run.toml", .text = config});
  run.open_for_training(requests);
  CHECK(run.train().finished);
  const DataLoss loss = run.evaluate().at(0);
  CHECK(loss.targets == 64);
  MESSAGE("top-1 " << loss.correct / loss.targets << ", loss " << loss.loss());
  CHECK(loss.correct / loss.targets > 0.85);  // 0.25 by chance
}
