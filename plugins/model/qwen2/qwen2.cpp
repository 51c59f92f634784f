#include "qwen2.h"

#include <cmath>

namespace quern::qwen2 {

namespace {

Qwen2Options checked(const Qwen2Options& options) {
  check_decoder(options, "qwen2");
  return options;
}

}  // namespace

Qwen2::Qwen2(const Qwen2Options& options)
    : o_(checked(options)), heads_(o_.heads()), rope_(rope_frequencies(o_.rope(), heads_.head_dim)) {}

ModelTraits Qwen2::traits() const {
  return {.layers = o_.num_hidden_layers,
          .width = o_.hidden_size,
          .vocabulary = o_.vocab_size,
          .max_positions = o_.max_position_embeddings};
}

std::vector<ParameterSpec> Qwen2::parameters() const {
  using enum ParameterGroup;
  const std::string layer = "model.layers.{layer}.";
  const std::int64_t width = o_.hidden_size, ffn = o_.intermediate_size;
  const std::int64_t q = heads_.heads * heads_.head_dim, kv = heads_.kv_heads * heads_.head_dim;
  const Init normal{Init::Kind::normal, o_.initializer_range}, zeros{Init::Kind::zeros, 0.0};
  const auto ones = Init::Kind::ones;
  // Query, key and value (gate and up) are one stored matrix, so that each is one product.
  auto qkv = [&](const std::string& suffix, const Init& init) -> std::vector<ParameterPart> {
    return {{layer + "self_attn.q_proj" + suffix, q, init},
            {layer + "self_attn.k_proj" + suffix, kv, init},
            {layer + "self_attn.v_proj" + suffix, kv, init}};
  };
  std::vector<ParameterSpec> list = {
      matrix("embedding.weight", embedding, "model.embed_tokens.weight", o_.vocab_size, width, normal),
      vector("attn_norm.weight", block, layer + "input_layernorm.weight", width, ones),
      packed("qkv.weight", block, qkv(".weight", normal), width),
      packed("qkv.bias", block, qkv(".bias", zeros), 1),
      matrix("o.weight", block, layer + "self_attn.o_proj.weight", width, q, normal),
      vector("ffn_norm.weight", block, layer + "post_attention_layernorm.weight", width, ones),
      packed("gate_up.weight", block,
             {{layer + "mlp.gate_proj.weight", ffn, normal}, {layer + "mlp.up_proj.weight", ffn, normal}}, width),
      matrix("down.weight", block, layer + "mlp.down_proj.weight", width, ffn, normal),
      vector("final_norm.weight", head, "model.norm.weight", width, ones),
  };
  if (!o_.tie_word_embeddings)
    list.push_back(matrix("lm_head.weight", head, "lm_head.weight", o_.vocab_size, width, normal));
  return list;
}

void Qwen2::embed(ProgramBuilder& b) const { b.output(b.embedding(b.tokens(), "embedding.weight")); }

void Qwen2::block(ProgramBuilder& b) const {
  ValueId x = b.stream(o_.hidden_size);

  ValueId normed = b.rms_norm(x, "attn_norm.weight", o_.rms_norm_eps, "attn_norm");
  ValueId qkv = b.linear(normed, "qkv.weight", "qkv", "qkv.bias");
  ValueId rotated = b.rope(qkv, heads_, rope_, "rotated");
  double scale = 1 / std::sqrt(static_cast<double>(heads_.head_dim));
  ValueId attended = b.attention(rotated, heads_, AttentionMask::causal, scale, "attention");
  x = b.add(x, b.linear(attended, "o.weight", "o"), "attn_residual");

  normed = b.rms_norm(x, "ffn_norm.weight", o_.rms_norm_eps, "ffn_norm");
  ValueId gated = b.swiglu(b.linear(normed, "gate_up.weight", "gate_up"), "swiglu");
  b.output(b.add(x, b.linear(gated, "down.weight", "down"), "ffn_residual"));
}

void Qwen2::head(ProgramBuilder& b) const {
  ValueId normed = b.rms_norm(b.stream(o_.hidden_size), "final_norm.weight", o_.rms_norm_eps, "final_norm");
  b.output(b.lm_loss(normed, o_.tie_word_embeddings ? "embedding.weight" : "lm_head.weight"));
}

std::string Qwen2::hf_config() const { return write_hf_config(qwen2_config(), decoder_fields(o_)); }

}  // namespace quern::qwen2
