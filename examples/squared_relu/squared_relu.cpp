#include "squared_relu.h"

#include <cmath>

namespace squared_relu {

using namespace quern;

namespace {

Options checked(const Options& options) {
  check_decoder(options, "squared_relu");
  return options;
}

}  // namespace

SquaredRelu::SquaredRelu(const Options& options)
    : o_(checked(options)), heads_(o_.heads()), rope_(rope_frequencies(o_.rope(), heads_.head_dim)) {}

ModelTraits SquaredRelu::traits() const {
  return {.layers = o_.num_hidden_layers,
          .width = o_.hidden_size,
          .vocabulary = o_.vocab_size,
          .max_positions = o_.max_position_embeddings};
}

std::vector<ParameterSpec> SquaredRelu::parameters() const {
  using enum ParameterGroup;
  const std::string layer = "model.layers.{layer}.";
  const std::int64_t width = o_.hidden_size, ffn = o_.intermediate_size;
  const std::int64_t q = heads_.heads * heads_.head_dim, kv = heads_.kv_heads * heads_.head_dim;
  const Init normal{Init::Kind::normal, o_.initializer_range};
  const auto ones = Init::Kind::ones;
  std::vector<ParameterSpec> list = {
      matrix("embedding.weight", embedding, "model.embed_tokens.weight", o_.vocab_size, width, normal),
      vector("attn_norm.weight", block, layer + "input_layernorm.weight", width, ones),
      packed("qkv.weight", block,
             {{layer + "self_attn.q_proj.weight", q, normal},
              {layer + "self_attn.k_proj.weight", kv, normal},
              {layer + "self_attn.v_proj.weight", kv, normal}},
             width),
      matrix("o.weight", block, layer + "self_attn.o_proj.weight", width, q, normal),
      vector("ffn_norm.weight", block, layer + "post_attention_layernorm.weight", width, ones),
      matrix("up.weight", block, layer + "mlp.up_proj.weight", ffn, width, normal),
      matrix("down.weight", block, layer + "mlp.down_proj.weight", width, ffn, normal),
      vector("final_norm.weight", head, "model.norm.weight", width, ones),
  };
  if (!o_.tie_word_embeddings)
    list.push_back(matrix("lm_head.weight", head, "lm_head.weight", o_.vocab_size, width, normal));
  return list;
}

void SquaredRelu::embed(ProgramBuilder& b) const { b.output(b.embedding(b.tokens(), "embedding.weight")); }

void SquaredRelu::block(ProgramBuilder& b) const {
  ValueId x = b.stream(o_.hidden_size);

  ValueId normed = b.rms_norm(x, "attn_norm.weight", o_.rms_norm_eps, "attn_norm");
  ValueId rotated = b.rope(b.linear(normed, "qkv.weight", "qkv"), heads_, rope_, "rotated");
  double scale = 1 / std::sqrt(static_cast<double>(heads_.head_dim));
  ValueId attended = b.attention(rotated, heads_, AttentionMask::causal, scale, "attention");
  x = b.add(x, b.linear(attended, "o.weight", "o"), "attn_residual");

  normed = b.rms_norm(x, "ffn_norm.weight", o_.rms_norm_eps, "ffn_norm");
  // The plugin's own op, written as any other is.
  ValueId hidden = b.op("squared_relu", {b.linear(normed, "up.weight", "up")}, "hidden").front();
  b.output(b.add(x, b.linear(hidden, "down.weight", "down"), "ffn_residual"));
}

void SquaredRelu::head(ProgramBuilder& b) const {
  ValueId normed = b.rms_norm(b.stream(o_.hidden_size), "final_norm.weight", o_.rms_norm_eps, "final_norm");
  b.output(b.lm_loss(normed, o_.tie_word_embeddings ? "embedding.weight" : "lm_head.weight"));
}

}  // namespace squared_relu
