#pragma once
// What a decoder-only transformer is made of, as data: the decoder (decoder.h) writes parameters and programs from it,
// and a family of models (family.h) fills it from the fields of its config.json.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "quern/builder.h"

namespace quern::decoder {

enum class NormKind : std::uint8_t { rms, layer };
/// Norm of queries and keys, before rope.
enum class QkNorm : std::uint8_t { none, head };

/// Which projections of a block have a bias.
struct Biases {
  bool qkv = false, o = false;
  bool gate_up = false, down = false;
};

/// Hugging Face names of the weights, without ".weight" and ".bias". A norm without a name is absent, so these say
/// where a block has norms: before a branch, after it (before it is added to the residual stream), or both.
struct Names {
  std::string embedding = "model.embed_tokens", final_norm = "model.norm", head = "lm_head";
  std::string layer = "model.layers.{layer}.";  ///< of all that follow
  std::string attn_norm = "input_layernorm", attn_after_norm = {};
  std::string ffn_norm = "post_attention_layernorm", ffn_after_norm = {};
  /// Three tensors, or one that has the rows of all.
  std::vector<std::string> qkv = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
  std::string q_norm = "self_attn.q_norm", k_norm = "self_attn.k_norm", o = "self_attn.o_proj";
  /// Two tensors, or one that has the rows of both.
  std::vector<std::string> gate_up = {"mlp.gate_proj", "mlp.up_proj"};
  std::string down = "mlp.down_proj";
};

struct Description {
  std::int64_t vocabulary = 0, width = 0, ffn = 0, layers = 0, max_positions = 0;
  HeadLayout heads;
  NormKind norm = NormKind::rms;
  double eps = 1e-6;
  QkNorm qk_norm = QkNorm::none;
  Biases biases;
  RopeFrequencies rope;
  double attention_scale = 1;
  bool tied = false;             ///< the LM head is the embedding
  double init_deviation = 0.02;  ///< of all matrices
  Names names;
};

}  // namespace quern::decoder
