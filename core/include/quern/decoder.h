#pragma once
// Shared by models with the Hugging Face fields of Llama: the fields as options, their checks, and the conversion to
// config.json. Each model has its own block and parameters.

#include <cstdint>
#include <string>

#include "quern/builder.h"
#include "quern/options.h"
#include "quern/rope.h"

namespace quern {

/// Fields by their Hugging Face names. A model derives from it and adds its own.
struct DecoderOptions {
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  std::string hidden_act = "silu";
  double rope_theta = 10000.0;
  // rope_scaling
  std::string rope_type = "default";
  double factor = 0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  std::int64_t original_max_position_embeddings = 0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double attention_factor = 0;

  /// The head layout, with zeros replaced by their defaults.
  HeadLayout heads() const;
  /// yarn without an original length takes max_position_embeddings for it, as transformers does.
  RopeConfig rope() const;
};

/// Refuses incompatible sizes and rope fields that are bad or unused: one config error for all of them, one line per
/// field, naming `model`.
void check_decoder(const DecoderOptions& options, const std::string& model);
/// The fields as in config.json: with zeros replaced by their defaults, and only the rope_scaling fields of its type.
OptionValues decoder_fields(const DecoderOptions& options);

/// The options, for a struct T that derives from DecoderOptions. Upper bounds keep products of sizes within 64 bits.
template <class T>
OptionTable<T> decoder_options() {
  using D = DecoderOptions;
  OptionTable<T> t;
  t.add("vocab_size", &D::vocab_size, "number of tokens in the vocabulary").required().at_least(2).at_most(1 << 30);
  t.add("hidden_size", &D::hidden_size, "width of the residual stream").required().at_least(2).at_most(1 << 20);
  t.add("intermediate_size", &D::intermediate_size, "width of the feed-forward layer")
      .required()
      .at_least(2)
      .at_most(1 << 22);
  t.add("num_hidden_layers", &D::num_hidden_layers, "number of blocks").required().at_least(1).at_most(10000);
  t.add("num_attention_heads", &D::num_attention_heads, "query heads").required().at_least(1).at_most(1 << 16);
  t.add("num_key_value_heads", &D::num_key_value_heads, "key and value heads; 0: as many as query heads")
      .at_least(0)
      .at_most(1 << 16);
  t.add("head_dim", &D::head_dim, "width of a head; 0: hidden_size / num_attention_heads").at_least(0).at_most(256);
  t.add("max_position_embeddings", &D::max_position_embeddings, "longest sequence, in tokens")
      .at_least(1)
      .at_most(1 << 30);
  t.add("rms_norm_eps", &D::rms_norm_eps, "added to the mean square in norms").at_least(0).at_most(1);
  t.add("initializer_range", &D::initializer_range, "standard deviation of initial weights").at_least(0).at_most(10);
  t.add("tie_word_embeddings", &D::tie_word_embeddings, "the LM head is the embedding");
  t.add("hidden_act", &D::hidden_act, "activation of the gate").one_of({"silu"});
  t.add("rope_theta", &D::rope_theta, "base of the rotary wavelengths").above(1);
  t.add("rope_scaling.rope_type", &D::rope_type, "how rotary frequencies are scaled")
      .one_of({"default", "linear", "llama3", "yarn"});
  t.add("rope_scaling.factor", &D::factor, "linear, llama3, yarn: by how much the context grows; 0: not given")
      .at_least(0);
  t.add("rope_scaling.low_freq_factor", &D::low_freq_factor, "llama3: turns below which a frequency is divided")
      .above(0);
  t.add("rope_scaling.high_freq_factor", &D::high_freq_factor, "llama3: turns above which a frequency is kept")
      .above(0);
  t.add("rope_scaling.original_max_position_embeddings", &D::original_max_position_embeddings,
        "llama3, yarn: context before scaling, in tokens; yarn: 0 is max_position_embeddings")
      .at_least(0)
      .at_most(1 << 30);
  t.add("rope_scaling.beta_fast", &D::beta_fast, "yarn: turns above which a frequency is kept").above(0);
  t.add("rope_scaling.beta_slow", &D::beta_slow, "yarn: turns below which a frequency is divided").above(0);
  t.add("rope_scaling.attention_factor", &D::attention_factor, "yarn: scale of cos and sin; 0: 0.1 ln(factor) + 1")
      .at_least(0);
  return t;
}

}  // namespace quern
