#pragma once
// The fields of config.json that families of decoders have, by their Hugging Face names: one table of them all, of
// which a family takes some (family.h), their checks, and what several families derive from them in the same way.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

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
  std::vector<double> short_factor = {}, long_factor = {};
  // of some families
  bool attention_bias = false;
  bool mlp_bias = false;
  std::int64_t n_inner = 0;
  double partial_rotary_factor = 1;
  std::int64_t original_positions = 0;  // original_max_position_embeddings, beside the table
  bool use_sliding_window = false;
  std::int64_t sliding_window = 0;
  std::int64_t max_window_layers = 0;
  std::int64_t sliding_window_pattern = 6;
  std::vector<std::string> layer_types = {};
  std::vector<double> no_rope_layers = {};
  std::int64_t no_rope_layer_interval = 4;
  double rope_local_base_freq = 10000.0;
  std::int64_t query_pre_attn_scalar = 256;
  double attn_logit_softcapping = 0, final_logit_softcapping = 0;

  /// The head layout, with zeros replaced by their defaults.
  HeadLayout heads() const;
  /// yarn without an original length takes max_position_embeddings for it, as transformers does.
  RopeConfig rope() const;
  /// Of longrope: tokens up to which the short factors hold.
  std::int64_t original_length() const;
  /// Elements of a head that rotate: partial_rotary_factor of it.
  std::int64_t rotated() const;
  /// Whether a layer looks at a window: what layer_types says, or else `otherwise`.
  bool has_window(std::int64_t layer, bool otherwise) const;
};

inline constexpr const char* kLongRope = "longrope";  // of families with long_factor alone
inline constexpr const char* kFullAttention = "full_attention";
inline constexpr const char* kSlidingAttention = "sliding_attention";

/// Those that every family has. Upper bounds keep products of sizes within 64 bits.
OptionTable<Fields> general_fields();
/// The general fields, and after them the fields that only some families have.
OptionTable<Fields> all_fields();

/// Refuses incompatible sizes and rope fields that are bad or unused: one config error for all of them, one line per
/// field, naming `model`.
void check_fields(const Fields& fields, const std::string& model);

/// `values` as in config.json: with zeros replaced by their defaults, and only the rope_scaling fields of its type.
OptionValues written_fields(const OptionValues& values, const Fields& fields);

/// `full` where layers look at all, `windowed` where they look at a window (has_window).
void set_forms(Description& description, const Fields& fields, const LayerForm& full, const LayerForm& windowed,
               const std::function<bool(std::int64_t)>& otherwise);

/// What most families are: Llama's block, with the fields that every family has.
Description llama_shape(const Fields& fields);

}  // namespace quern::decoder
