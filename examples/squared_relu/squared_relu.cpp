#include "squared_relu.h"

#include <cmath>

#include "quern/error.h"

namespace squared_relu {

using namespace quern;

namespace {

// A message has: where, what is wrong, what was found, what was expected.
HeadLayout heads_of(const Options& o) {
  const std::int64_t per_pair = 2 * o.num_attention_heads;
  if (o.hidden_size % per_pair != 0 || o.hidden_size / o.num_attention_heads > 256)
    throw Error(ErrorCode::config, {.where = "model.squared_relu.hidden_size",
                                    .what = "does not divide into heads of an even width of at most 256",
                                    .found = std::to_string(o.hidden_size),
                                    .expected = "a multiple of " + std::to_string(per_pair) +
                                                ", twice num_attention_heads, and at most 256 times that number"});
  return {.heads = o.num_attention_heads,
          .kv_heads = o.num_attention_heads,
          .head_dim = o.hidden_size / o.num_attention_heads};
}

RopeConfig rope_of(const Options& o) {
  RopeConfig rope;
  rope.theta = o.rope_theta;
  return rope;
}

}  // namespace

SquaredRelu::SquaredRelu(const Options& options)
    : o_(options), heads_(heads_of(o_)), rope_(rope_frequencies(rope_of(o_), heads_.head_dim)) {}

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
  const Init normal{Init::Kind::normal, o_.initializer_range};
  const auto ones = Init::Kind::ones;
  return {
      matrix("embedding.weight", embedding, "model.embed_tokens.weight", o_.vocab_size, width, normal),
      vector("attn_norm.weight", block, layer + "input_layernorm.weight", width, ones),
      packed("qkv.weight", block,
             {{layer + "self_attn.q_proj.weight", width, normal},
              {layer + "self_attn.k_proj.weight", width, normal},
              {layer + "self_attn.v_proj.weight", width, normal}},
             width),
      matrix("o.weight", block, layer + "self_attn.o_proj.weight", width, width, normal),
      vector("ffn_norm.weight", block, layer + "post_attention_layernorm.weight", width, ones),
      matrix("up.weight", block, layer + "mlp.up_proj.weight", ffn, width, normal),
      matrix("down.weight", block, layer + "mlp.down_proj.weight", width, ffn, normal),
      vector("final_norm.weight", head, "model.norm.weight", width, ones),
      matrix("lm_head.weight", head, "lm_head.weight", o_.vocab_size, width, normal),
  };
}

void SquaredRelu::embed(ProgramBuilder& b) const { b.output(b.embedding(b.tokens(), "embedding.weight")); }

void SquaredRelu::block(ProgramBuilder& b, std::int64_t /*layer*/) const {
  ValueId x = b.stream(o_.hidden_size);

  ValueId normed = b.rms_norm(x, "attn_norm.weight", o_.rms_norm_eps, "attn_norm");
  ValueId rotated = b.rope(b.linear(normed, "qkv.weight", "qkv"), heads_, rope_, "rotated");
  double scale = 1 / std::sqrt(static_cast<double>(heads_.head_dim));
  ValueId attended = b.attention(rotated, heads_, {.scale = scale}, "attention");
  x = b.add(x, b.linear(attended, "o.weight", "o"), "attn_residual");

  normed = b.rms_norm(x, "ffn_norm.weight", o_.rms_norm_eps, "ffn_norm");
  // The plugin's own op, written as any other is.
  ValueId hidden = b.op("squared_relu", {b.linear(normed, "up.weight", "up")}, "hidden").front();
  b.output(b.add(x, b.linear(hidden, "down.weight", "down"), "ffn_residual"));
}

void SquaredRelu::head(ProgramBuilder& b) const {
  ValueId normed = b.rms_norm(b.stream(o_.hidden_size), "final_norm.weight", o_.rms_norm_eps, "final_norm");
  b.output(b.lm_loss(normed, "lm_head.weight"));
}

std::string SquaredRelu::hf_config() const {
  OptionValues fields;
  fields.set("vocab_size", o_.vocab_size);
  fields.set("hidden_size", o_.hidden_size);
  fields.set("intermediate_size", o_.intermediate_size);
  fields.set("num_hidden_layers", o_.num_hidden_layers);
  fields.set("num_attention_heads", o_.num_attention_heads);
  fields.set("max_position_embeddings", o_.max_position_embeddings);
  fields.set("rms_norm_eps", o_.rms_norm_eps);
  fields.set("initializer_range", o_.initializer_range);
  fields.set("rope_theta", o_.rope_theta);
  return write_hf_config(hf_model(), fields);
}

}  // namespace squared_relu
