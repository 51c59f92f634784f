#pragma once
// The fields of config.json that families of decoders have, by their Hugging Face names: one table of them all, of
// which a family takes some (family.h), their checks, and what several families derive from them in the same way.

#include <cstdint>
#include <string>

#include "quern/options.h"
#include "quern/rope.h"
#include "shared/decoder/description.h"

namespace quern::decoder {

struct Fields {
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
  // of some families
  bool attention_bias = false;
  bool mlp_bias = false;

  /// The head layout, with zeros replaced by their defaults.
  HeadLayout heads() const;
  /// yarn without an original length takes max_position_embeddings for it, as transformers does.
  RopeConfig rope() const;
};

/// Those that every family has. Upper bounds keep products of sizes within 64 bits.
OptionTable<Fields> general_fields();
/// The general fields, and after them the fields that only some families have.
OptionTable<Fields> all_fields();

/// Refuses incompatible sizes and rope fields that are bad or unused: one config error for all of them, one line per
/// field, naming `model`.
void check_fields(const Fields& fields, const std::string& model);

/// `values` as in config.json: with zeros replaced by their defaults, and only the rope_scaling fields of its type.
OptionValues written_fields(const OptionValues& values, const Fields& fields);

/// What most families are: Llama's block, with the fields that every family has.
Description llama_shape(const Fields& fields);

}  // namespace quern::decoder
