#include "shared/decoder/decoder.h"

#include <cmath>

namespace quern::decoder {

namespace {

const DecoderOptions& checked(const DecoderOptions& options, const std::string& family) {
  check_decoder(options, family);
  return options;
}

}  // namespace

Decoder::Decoder(const DecoderOptions& options, const Biases& biases, const std::string& family)
    : o_(checked(options, family)),
      biases_(biases),
      heads_(o_.heads()),
      rope_(rope_frequencies(o_.rope(), heads_.head_dim)) {}

ModelTraits Decoder::traits() const {
  return {.layers = o_.num_hidden_layers,
          .width = o_.hidden_size,
          .vocabulary = o_.vocab_size,
          .max_positions = o_.max_position_embeddings};
}

std::vector<ParameterSpec> Decoder::parameters() const {
  using enum ParameterGroup;
  const std::string layer = "model.layers.{layer}.";
  const std::int64_t width = o_.hidden_size, ffn = o_.intermediate_size;
  const std::int64_t q = heads_.heads * heads_.head_dim, kv = heads_.kv_heads * heads_.head_dim;
  const Init normal{Init::Kind::normal, o_.initializer_range}, zeros{Init::Kind::zeros, 0.0};
  const auto ones = Init::Kind::ones;
  // Query, key and value (gate and up) are one stored matrix, so that each is one matmul.
  auto qkv = [&](const std::string& suffix, const Init& init) -> std::vector<ParameterPart> {
    return {{layer + "self_attn.q_proj" + suffix, q, init},
            {layer + "self_attn.k_proj" + suffix, kv, init},
            {layer + "self_attn.v_proj" + suffix, kv, init}};
  };
  auto gate_up = [&](const std::string& suffix, const Init& init) -> std::vector<ParameterPart> {
    return {{layer + "mlp.gate_proj" + suffix, ffn, init}, {layer + "mlp.up_proj" + suffix, ffn, init}};
  };
  std::vector<ParameterSpec> list;
  auto projection = [&](const std::string& name, const std::vector<ParameterPart>& parts, std::int64_t columns) {
    list.push_back(packed(name, block, parts, columns));
  };
  list.push_back(matrix("embedding.weight", embedding, "model.embed_tokens.weight", o_.vocab_size, width, normal));
  list.push_back(vector("attn_norm.weight", block, layer + "input_layernorm.weight", width, ones));
  projection("qkv.weight", qkv(".weight", normal), width);
  if (biases_.qkv) projection("qkv.bias", qkv(".bias", zeros), 1);
  list.push_back(matrix("o.weight", block, layer + "self_attn.o_proj.weight", width, q, normal));
  list.push_back(vector("ffn_norm.weight", block, layer + "post_attention_layernorm.weight", width, ones));
  projection("gate_up.weight", gate_up(".weight", normal), width);
  list.push_back(matrix("down.weight", block, layer + "mlp.down_proj.weight", width, ffn, normal));
  list.push_back(vector("final_norm.weight", head, "model.norm.weight", width, ones));
  if (biases_.o) list.push_back(vector("o.bias", block, layer + "self_attn.o_proj.bias", width, Init::Kind::zeros));
  if (biases_.gate_up) projection("gate_up.bias", gate_up(".bias", zeros), 1);
  if (biases_.down) list.push_back(vector("down.bias", block, layer + "mlp.down_proj.bias", width, Init::Kind::zeros));
  if (!o_.tie_word_embeddings)
    list.push_back(matrix("lm_head.weight", head, "lm_head.weight", o_.vocab_size, width, normal));
  return list;
}

void Decoder::embed(ProgramBuilder& b) const { b.output(b.embedding(b.tokens(), "embedding.weight")); }

void Decoder::block(ProgramBuilder& b) const {
  auto bias = [](bool has, const char* name) { return has ? name : ""; };
  ValueId x = b.stream(o_.hidden_size);

  ValueId normed = b.rms_norm(x, "attn_norm.weight", o_.rms_norm_eps, "attn_norm");
  ValueId qkv = b.linear(normed, "qkv.weight", "qkv", bias(biases_.qkv, "qkv.bias"));
  ValueId rotated = b.rope(qkv, heads_, rope_, "rotated");
  double scale = 1 / std::sqrt(static_cast<double>(heads_.head_dim));
  ValueId attended = b.attention(rotated, heads_, AttentionMask::causal, scale, "attention");
  ValueId o = b.linear(attended, "o.weight", "o", bias(biases_.o, "o.bias"));
  x = b.add(x, o, "attn_residual");

  normed = b.rms_norm(x, "ffn_norm.weight", o_.rms_norm_eps, "ffn_norm");
  ValueId gate_up = b.linear(normed, "gate_up.weight", "gate_up", bias(biases_.gate_up, "gate_up.bias"));
  ValueId gated = b.swiglu(gate_up, "swiglu");
  ValueId down = b.linear(gated, "down.weight", "down", bias(biases_.down, "down.bias"));
  b.output(b.add(x, down, "ffn_residual"));
}

void Decoder::head(ProgramBuilder& b) const {
  ValueId normed = b.rms_norm(b.stream(o_.hidden_size), "final_norm.weight", o_.rms_norm_eps, "final_norm");
  b.output(b.lm_loss(normed, o_.tie_word_embeddings ? "embedding.weight" : "lm_head.weight"));
}

}  // namespace quern::decoder
