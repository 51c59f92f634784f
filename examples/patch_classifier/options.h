#pragma once
// Options of [model.patch_classifier]. The same names are the fields of its config.json.

#include "quern/hf_config.h"
#include "quern/options.h"

namespace patch_classifier {

struct Options {
  std::int64_t patch_values = 16;
  std::int64_t num_labels = 4;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t max_position_embeddings = 16;
  double layer_norm_eps = 1e-6;
  double initializer_range = 0.02;
  double label_smoothing = 0.1;
  double centre_momentum = 0.9;
};

inline quern::OptionTable<Options> options() {
  quern::OptionTable<Options> t;
  // Upper bounds keep products of sizes within 64 bits.
  t.add("patch_values", &Options::patch_values, "numbers of a patch").at_least(1).at_most(1 << 16);
  t.add("num_labels", &Options::num_labels, "classes").at_least(2).at_most(1 << 20);
  t.add("hidden_size", &Options::hidden_size, "width of the residual stream").required().at_least(2).at_most(1 << 20);
  t.add("intermediate_size", &Options::intermediate_size, "width of the feed-forward layer")
      .required()
      .at_least(1)
      .at_most(1 << 22);
  t.add("num_hidden_layers", &Options::num_hidden_layers, "number of blocks").required().at_least(1).at_most(10000);
  t.add("num_attention_heads", &Options::num_attention_heads, "attention heads")
      .required()
      .at_least(1)
      .at_most(1 << 16);
  t.add("max_position_embeddings", &Options::max_position_embeddings, "most patches of an image")
      .at_least(1)
      .at_most(1 << 20);
  t.add("layer_norm_eps", &Options::layer_norm_eps, "added to the variance in norms").at_least(0).at_most(1);
  t.add("initializer_range", &Options::initializer_range, "standard deviation of initial weights").at_least(0);
  t.add("label_smoothing", &Options::label_smoothing, "share of the target that all classes get alike")
      .at_least(0)
      .at_most(0.999);
  t.add("centre_momentum", &Options::centre_momentum, "share of the mean that a step keeps; 1: it stays 0")
      .at_least(0)
      .at_most(1);
  return t;
}

inline quern::HfModel hf_model() {
  return {.model_type = "patch_classifier",
          .architecture = "PatchClassifierForImageClassification",
          .options = options().specs()};
}

}  // namespace patch_classifier
