#include "llama.h"

#include <cmath>

namespace quern::llama {

namespace {

LlamaOptions checked(const LlamaOptions& options) {
  check_decoder(options, "llama");
  return options;
}

}  // namespace

Llama::Llama(const LlamaOptions& options)
    : o_(checked(options)), heads_(o_.heads()), rope_(rope_frequencies(o_.rope(), heads_.head_dim)) {}

ModelTraits Llama::traits() const {
  return {.layers = o_.num_hidden_layers,
          .width = o_.hidden_size,
          .vocabulary = o_.vocab_size,
          .max_positions = o_.max_position_embeddings};
}

std::vector<ParameterSpec> Llama::parameters() const {
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
  auto gate_up = [&](const std::string& suffix, const Init& init) -> std::vector<ParameterPart> {
    return {{layer + "mlp.gate_proj" + suffix, ffn, init}, {layer + "mlp.up_proj" + suffix, ffn, init}};
  };
  std::vector<ParameterSpec> list = {
      matrix("embedding.weight", embedding, "model.embed_tokens.weight", o_.vocab_size, width, normal),
      vector("attn_norm.weight", block, layer + "input_layernorm.weight", width, ones),
      packed("qkv.weight", block, qkv(".weight", normal), width),
      matrix("o.weight", block, layer + "self_attn.o_proj.weight", width, q, normal),
      vector("ffn_norm.weight", block, layer + "post_attention_layernorm.weight", width, ones),
      packed("gate_up.weight", block, gate_up(".weight", normal), width),
      matrix("down.weight", block, layer + "mlp.down_proj.weight", width, ffn, normal),
      vector("final_norm.weight", head, "model.norm.weight", width, ones),
  };
  if (o_.attention_bias) {
    list.push_back(packed("qkv.bias", block, qkv(".bias", zeros), 1));
    list.push_back(vector("o.bias", block, layer + "self_attn.o_proj.bias", width, Init::Kind::zeros));
  }
  if (o_.mlp_bias) {
    list.push_back(packed("gate_up.bias", block, gate_up(".bias", zeros), 1));
    list.push_back(vector("down.bias", block, layer + "mlp.down_proj.bias", width, Init::Kind::zeros));
  }
  if (!o_.tie_word_embeddings)
    list.push_back(matrix("lm_head.weight", head, "lm_head.weight", o_.vocab_size, width, normal));
  return list;
}

void Llama::embed(ProgramBuilder& b) const { b.output(b.embedding(b.tokens(), "embedding.weight")); }

void Llama::block(ProgramBuilder& b) const {
  auto bias = [](bool has, const char* name) { return has ? name : ""; };
  ValueId x = b.stream(o_.hidden_size);

  ValueId normed = b.rms_norm(x, "attn_norm.weight", o_.rms_norm_eps, "attn_norm");
  ValueId qkv = b.linear(normed, "qkv.weight", "qkv", bias(o_.attention_bias, "qkv.bias"));
  ValueId rotated = b.rope(qkv, heads_, rope_, "rotated");
  double scale = 1 / std::sqrt(static_cast<double>(heads_.head_dim));
  ValueId attended = b.attention(rotated, heads_, AttentionMask::causal, scale, "attention");
  ValueId o = b.linear(attended, "o.weight", "o", bias(o_.attention_bias, "o.bias"));
  x = b.add(x, o, "attn_residual");

  normed = b.rms_norm(x, "ffn_norm.weight", o_.rms_norm_eps, "ffn_norm");
  ValueId gate_up = b.linear(normed, "gate_up.weight", "gate_up", bias(o_.mlp_bias, "gate_up.bias"));
  ValueId gated = b.swiglu(gate_up, "swiglu");
  ValueId down = b.linear(gated, "down.weight", "down", bias(o_.mlp_bias, "down.bias"));
  b.output(b.add(x, down, "ffn_residual"));
}

void Llama::head(ProgramBuilder& b) const {
  ValueId normed = b.rms_norm(b.stream(o_.hidden_size), "final_norm.weight", o_.rms_norm_eps, "final_norm");
  b.output(b.lm_loss(normed, o_.tie_word_embeddings ? "embedding.weight" : "lm_head.weight"));
}

std::string Llama::hf_config() const {
  OptionValues fields = decoder_fields(o_);
  fields.set("attention_bias", o_.attention_bias);
  fields.set("mlp_bias", o_.mlp_bias);
  return write_hf_config(llama_config(), fields);
}

}  // namespace quern::llama
