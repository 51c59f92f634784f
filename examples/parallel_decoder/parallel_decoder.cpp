#include "parallel_decoder.h"

#include <cmath>

#include "quern/error.h"

namespace parallel_decoder {

using namespace quern;

namespace {

// Checks across options. A message has: where, what is wrong, what was found, what was expected.
Options checked(const Options& o) {
  const std::int64_t per_pair = 2 * o.num_attention_heads;
  if (o.hidden_size % per_pair != 0 || o.hidden_size / o.num_attention_heads > 256)
    throw Error(ErrorCode::config, {.where = "model.parallel_decoder.hidden_size",
                                    .what = "does not divide into heads of an even width of at most 256",
                                    .found = std::to_string(o.hidden_size),
                                    .expected = "a multiple of " + std::to_string(per_pair) +
                                                ", twice num_attention_heads, and at most 256 times that number"});
  return o;
}

HeadLayout heads_of(const Options& o) {
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

ParallelDecoder::ParallelDecoder(const Options& options)
    : o_(checked(options)), heads_(heads_of(o_)), rope_(rope_frequencies(rope_of(o_), heads_.head_dim)) {}

ModelTraits ParallelDecoder::traits() const {
  return {.layers = o_.num_hidden_layers,
          .width = o_.hidden_size,
          .vocabulary = o_.vocab_size,
          .max_positions = o_.max_position_embeddings};
}

// A name in programs, the group (made once, once a layer, or with the head), the names under which weights are exported
// ({layer} is the layer's number), and the size. Query, key and value are one stored matrix, so they are one matmul.
std::vector<ParameterSpec> ParallelDecoder::parameters() const {
  using enum ParameterGroup;
  const std::string layer = "layers.{layer}.";
  const std::int64_t width = o_.hidden_size;
  const Init normal{Init::Kind::normal, o_.initializer_range};
  // Weights that add to the residual stream start smaller, by the number of additions (Radford et al., GPT-2, 2019).
  const Init added{Init::Kind::normal,
                   o_.initializer_range / std::sqrt(2.0 * static_cast<double>(o_.num_hidden_layers))};
  return {
      matrix("embedding.weight", embedding, "embedding.weight", o_.vocab_size, width, normal),
      vector("norm.weight", block, layer + "norm.weight", width, Init::Kind::ones),
      vector("norm.bias", block, layer + "norm.bias", width, Init::Kind::zeros),
      packed("qkv.weight", block,
             {{layer + "q.weight", width, normal},
              {layer + "k.weight", width, normal},
              {layer + "v.weight", width, normal}},
             width),
      matrix("o.weight", block, layer + "o.weight", width, width, added),
      matrix("up.weight", block, layer + "up.weight", 4 * width, width, normal),
      matrix("down.weight", block, layer + "down.weight", width, 4 * width, added),
      vector("final_norm.weight", head, "final_norm.weight", width, Init::Kind::ones),
      vector("final_norm.bias", head, "final_norm.bias", width, Init::Kind::zeros),
      matrix("lm_head.weight", head, "lm_head.weight", o_.vocab_size, width, normal),
  };
}

void ParallelDecoder::embed(ProgramBuilder& b) const { b.output(b.embedding(b.tokens(), "embedding.weight")); }

// Layers of one kind share a program. Here every second one has its attention in a window.
std::int64_t ParallelDecoder::block_kind(std::int64_t layer) const { return o_.sliding_window > 0 ? layer % 2 : 0; }

void ParallelDecoder::block(ProgramBuilder& b, std::int64_t layer) const {
  ValueId x = b.stream(o_.hidden_size);  // (N, width); N is the tokens of a micro-batch
  ValueId normed = b.layer_norm(x, "norm.weight", "norm.bias", o_.layer_norm_eps, "norm");

  ValueId rotated = b.rope(b.linear(normed, "qkv.weight", "qkv"), heads_, rope_, "rotated");
  double scale = 1 / std::sqrt(static_cast<double>(heads_.head_dim));
  ValueId attended = b.attention(
      rotated, heads_, {.window = block_kind(layer) == 1 ? o_.sliding_window : 0, .scale = scale}, "attention");
  ValueId attention = b.linear(attended, "o.weight", "o");

  ValueId hidden = b.gelu(b.linear(normed, "up.weight", "up"), Gelu::tanh, "gelu");
  ValueId feed_forward = b.linear(hidden, "down.weight", "down");

  b.output(b.add(x, b.add(attention, feed_forward, "both"), "residual"));
}

void ParallelDecoder::head(ProgramBuilder& b) const {
  ValueId x = b.stream(o_.hidden_size);
  ValueId normed = b.layer_norm(x, "final_norm.weight", "final_norm.bias", o_.layer_norm_eps, "final_norm");
  b.output(b.lm_loss(normed, "lm_head.weight"));
}

std::string ParallelDecoder::hf_config() const {
  OptionValues fields;
  fields.set("vocab_size", o_.vocab_size);
  fields.set("hidden_size", o_.hidden_size);
  fields.set("num_hidden_layers", o_.num_hidden_layers);
  fields.set("num_attention_heads", o_.num_attention_heads);
  fields.set("max_position_embeddings", o_.max_position_embeddings);
  fields.set("sliding_window", o_.sliding_window);
  fields.set("layer_norm_eps", o_.layer_norm_eps);
  fields.set("initializer_range", o_.initializer_range);
  fields.set("rope_theta", o_.rope_theta);
  return write_hf_config(hf_model(), fields);
}

}  // namespace parallel_decoder
