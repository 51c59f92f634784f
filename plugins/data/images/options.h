#pragma once
// Options of [data.images].

#include <string>
#include <vector>

#include "quern/options.h"

namespace quern::images {

struct Options {
  std::string train;
  std::string validation;
  std::int64_t size = 224;
  std::int64_t patch = 16;
  std::int64_t channels = 3;
  double smallest_area = 0.08;
  double flip = 0.5;
  std::string interpolation = "bicubic";
  double crop = 0.9;
  std::vector<double> mean = {0.5, 0.5, 0.5};
  std::vector<double> deviation = {0.5, 0.5, 0.5};
  std::string pixels = "f32";
  bool balanced = false;
  std::int64_t threads = 0;
};

inline OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("train", &Options::train, "folder with one folder of .png, .jpg and .jpeg files for each class");
  t.add("validation", &Options::validation, "another such folder, with the same classes; empty: none");
  t.add("size", &Options::size, "height and width that images are brought to, in pixels").at_least(1).at_most(1 << 14);
  t.add("patch", &Options::patch, "height and width of a patch, in pixels").at_least(1).at_most(1 << 10);
  t.add("channels", &Options::channels, "3: red, green and blue; 1: grey").at_least(1).at_most(3);
  t.add("smallest_area", &Options::smallest_area,
        "training crops are from this share of the image's area up to all of it, 3:4 to 4:3; 1: as in validation")
      .above(0)
      .at_most(1);
  t.add("flip", &Options::flip, "how often training images are flipped left to right").at_least(0).at_most(1);
  t.add("interpolation", &Options::interpolation, "how images are resized").one_of({"bicubic", "bilinear"});
  t.add("crop", &Options::crop, "share of the shorter side that validation's square in the middle has")
      .above(0)
      .at_most(1);
  t.add("mean", &Options::mean, "of each channel, subtracted from values of 0 to 1");
  t.add("deviation", &Options::deviation, "of each channel, divided by");
  t.add("pixels", &Options::pixels,
        "f32, or u8: rounded to 0 to 255, a quarter of the bytes, and input `pixel_scale` has mean and deviation")
      .one_of({"f32", "u8"});
  t.add("balanced", &Options::balanced,
        "gives input `weights`: of an image the mean size of a class divided by the size of its own");
  t.add("threads", &Options::threads, "that decode images; 0: all of the machine").at_least(0).at_most(1024);
  return t;
}

}  // namespace quern::images
