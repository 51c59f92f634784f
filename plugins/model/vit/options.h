#pragma once
// Options of [model.vit], by the names of timm's VisionTransformer. The same names are the fields of its config.json.

#include "quern/hf_config.h"
#include "quern/options.h"

namespace quern::vit {

struct Options {
  std::int64_t img_size = 224;
  std::int64_t patch_size = 16;
  std::int64_t in_chans = 3;
  std::int64_t num_classes = 1000;
  std::int64_t embed_dim = 0;
  std::int64_t depth = 0;
  std::int64_t num_heads = 0;
  double mlp_ratio = 4;
  bool qkv_bias = true;
  bool class_token = true;
  std::string global_pool = "token";
  double layer_norm_eps = 1e-6;
  double label_smoothing = 0;
  bool weighted = false;
  std::string pixels = "f32";
};

inline OptionTable<Options> options() {
  OptionTable<Options> t;
  // Upper bounds keep products of sizes within 64 bits.
  t.add("img_size", &Options::img_size, "height and width of an image, in pixels").at_least(1).at_most(1 << 14);
  t.add("patch_size", &Options::patch_size, "height and width of a patch, in pixels").at_least(1).at_most(1 << 10);
  t.add("in_chans", &Options::in_chans, "channels of an image").at_least(1).at_most(64);
  t.add("num_classes", &Options::num_classes, "classes").at_least(2).at_most(1 << 20);
  t.add("embed_dim", &Options::embed_dim, "width of the residual stream").required().at_least(2).at_most(1 << 20);
  t.add("depth", &Options::depth, "number of blocks").required().at_least(1).at_most(10000);
  t.add("num_heads", &Options::num_heads, "attention heads").required().at_least(1).at_most(1 << 16);
  t.add("mlp_ratio", &Options::mlp_ratio, "width of the feed-forward layer, in multiples of embed_dim, rounded down")
      .above(0)
      .at_most(64);
  t.add("qkv_bias", &Options::qkv_bias, "biases of queries, keys and values");
  t.add("class_token", &Options::class_token, "a token before the patches that stands for the image");
  t.add("global_pool", &Options::global_pool, "the class token is classified, or the mean of the patches")
      .one_of({"token", "avg"});
  t.add("layer_norm_eps", &Options::layer_norm_eps, "added to the variance in norms").at_least(0).at_most(1);
  t.add("label_smoothing", &Options::label_smoothing, "share of the target that all classes get alike")
      .at_least(0)
      .at_most(0.999);
  t.add("weighted", &Options::weighted, "the data give each image a weight, by which its loss is multiplied");
  t.add("pixels", &Options::pixels, "as the data give them: f32, or u8 with input `pixel_scale`").one_of({"f32", "u8"});
  return t;
}

inline HfModel hf_model() {
  return {.model_type = "vit", .architecture = "VisionTransformer", .options = options().specs()};
}

}  // namespace quern::vit
