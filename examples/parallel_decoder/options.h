#pragma once
// Options of [model.parallel_decoder]. The same names are the fields of its config.json, which a run reads when
// model.config names one and writes when it exports.

#include "quern/hf_config.h"
#include "quern/options.h"

namespace parallel_decoder {

struct Options {
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t max_position_embeddings = 2048;
  std::int64_t sliding_window = 0;
  double layer_norm_eps = 1e-5;
  double initializer_range = 0.02;
  double rope_theta = 10000.0;
};

inline quern::OptionTable<Options> options() {
  quern::OptionTable<Options> t;
  // Upper bounds keep products of sizes within 64 bits.
  t.add("vocab_size", &Options::vocab_size, "number of tokens in the vocabulary")
      .required()
      .at_least(2)
      .at_most(1 << 30);
  t.add("hidden_size", &Options::hidden_size, "width of the residual stream").required().at_least(2).at_most(1 << 20);
  t.add("num_hidden_layers", &Options::num_hidden_layers, "number of blocks").required().at_least(1).at_most(10000);
  t.add("num_attention_heads", &Options::num_attention_heads, "attention heads")
      .required()
      .at_least(1)
      .at_most(1 << 16);
  t.add("max_position_embeddings", &Options::max_position_embeddings, "longest sequence, in tokens").at_least(1);
  t.add("sliding_window", &Options::sliding_window,
        "tokens that attention of every second layer sees, its own the last; 0: all before it")
      .at_least(0);
  t.add("layer_norm_eps", &Options::layer_norm_eps, "added to the variance in norms").at_least(0).at_most(1);
  t.add("initializer_range", &Options::initializer_range, "standard deviation of initial weights").at_least(0);
  t.add("rope_theta", &Options::rope_theta, "base of the rotary wavelengths").above(1);
  return t;
}

inline quern::HfModel hf_model() {
  return {.model_type = "parallel_decoder", .architecture = "ParallelDecoderForCausalLM", .options = options().specs()};
}

}  // namespace parallel_decoder
