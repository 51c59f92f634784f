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
/// Norm of queries and keys, before rope: of each head, or of all heads together.
enum class QkNorm : std::uint8_t { none, head, width };
/// Gated ones have two matrices and multiply: silu(gate) up, gelu(gate) up. The others have one.
enum class Activation : std::uint8_t { swiglu, geglu, gelu_erf, gelu_tanh };

/// How queries and keys are rotated. The stored rows of a head are reordered so that the pairs that rotate together are
/// half a head apart, as the op has them; scores do not depend on the order. Pairs that are left have frequency 0.
enum class RopePairs : std::uint8_t { halves, adjacent };

/// What layers may differ in.
struct LayerForm {
  std::optional<RopeFrequencies> rope = {};  ///< of the first 2 * inverse.size() elements of a head; none: no rope
  std::vector<double> long_inverse = {};     ///< in place of rope's in runs of longer sequences than long_beyond
  std::int64_t long_beyond = 0;              ///< tokens; without long_inverse unused
  std::int64_t window = 0;                   ///< keys that a query sees; 0: all
};

/// Which projections of a block have a bias.
struct Biases {
  bool qkv = false, o = false;
  bool gate_up = false, down = false;
};

/// Hugging Face names of the weights, without ".weight" and ".bias". A norm without a name is absent, so these say
/// where a block has norms: before a branch, after it (before it is added to the residual stream), or both.
struct Names {
  std::string embedding = "model.embed_tokens", final_norm = "model.norm", head = "lm_head";
  std::string positions = {};                   ///< learned positions; empty: there are none
  std::string layer = "model.layers.{layer}.";  ///< of all that follow
  std::string attn_norm = "input_layernorm", attn_after_norm = {};
  std::string ffn_norm = "post_attention_layernorm", ffn_after_norm = {};
  /// Three tensors, or one that has the rows of all.
  std::vector<std::string> qkv = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
  std::string q_norm = "self_attn.q_norm", k_norm = "self_attn.k_norm", o = "self_attn.o_proj";
  /// Two tensors, or one that has the rows of both; one where the activation is not gated.
  std::vector<std::string> gate_up = {"mlp.gate_proj", "mlp.up_proj"};
  std::string down = "mlp.down_proj";
  bool transposed = false;  ///< matrices of layers are (in, out)
};

struct Description {
  std::int64_t vocabulary = 0, width = 0, ffn = 0, layers = 0, max_positions = 0;
  HeadLayout heads;
  NormKind norm = NormKind::rms;
  double eps = 1e-6;
  double norm_offset = 0;  ///< norms multiply by this plus the weight
  QkNorm qk_norm = QkNorm::none;
  Biases biases;
  Activation activation = Activation::swiglu;
  std::vector<LayerForm> forms;    ///< the kinds of layers
  std::vector<int> form_of_layer;  ///< indices of `forms`; empty: all layers have the first
  RopePairs rope_pairs = RopePairs::halves;
  double attention_scale = 1;
  double attention_cap = 0, logit_cap = 0;  ///< soft caps of scores and of logits; 0: none
  double embedding_scale = 1;
  bool tied = false;             ///< the LM head is the embedding
  double init_deviation = 0.02;  ///< of all matrices
  Names names;

  bool gated() const { return activation == Activation::swiglu || activation == Activation::geglu; }
  int form(std::int64_t layer) const {
    return form_of_layer.empty() ? 0 : form_of_layer[static_cast<std::size_t>(layer)];
  }
};

}  // namespace quern::decoder
