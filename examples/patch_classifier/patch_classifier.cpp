#include "patch_classifier.h"

#include <cmath>

#include "quern/error.h"

namespace patch_classifier {

using namespace quern;

namespace {

HeadLayout heads_of(const Options& o) {
  if (o.hidden_size % o.num_attention_heads != 0 || o.hidden_size / o.num_attention_heads > 256)
    throw Error(ErrorCode::config, {.where = "model.patch_classifier.hidden_size",
                                    .what = "does not divide into heads of at most 256",
                                    .found = std::to_string(o.hidden_size),
                                    .expected = "a multiple of " + std::to_string(o.num_attention_heads) +
                                                ", num_attention_heads, and at most 256 times that number"});
  return {.heads = o.num_attention_heads,
          .kv_heads = o.num_attention_heads,
          .head_dim = o.hidden_size / o.num_attention_heads};
}

}  // namespace

PatchClassifier::PatchClassifier(const Options& options) : o_(options), heads_(heads_of(o_)) {}

// No vocabulary: the model reads no tokens, and no texts are made of it.
ModelTraits PatchClassifier::traits() const {
  return {.layers = o_.num_hidden_layers,
          .width = o_.hidden_size,
          .max_positions = o_.max_position_embeddings,
          .causal = false};
}

std::vector<ParameterSpec> PatchClassifier::parameters() const {
  using enum ParameterGroup;
  const std::string layer = "layers.{layer}.";
  const std::int64_t width = o_.hidden_size, ffn = o_.intermediate_size;
  const Init normal{Init::Kind::normal, o_.initializer_range};
  const auto ones = Init::Kind::ones, zeros = Init::Kind::zeros;
  return {
      matrix("patch.weight", embedding, "patch.weight", width, o_.patch_values, normal),
      vector("patch.bias", embedding, "patch.bias", width, zeros),
      matrix("position.weight", embedding, "position.weight", o_.max_position_embeddings, width, normal),
      vector("attn_norm.weight", block, layer + "attn_norm.weight", width, ones),
      vector("attn_norm.bias", block, layer + "attn_norm.bias", width, zeros),
      packed("qkv.weight", block,
             {{layer + "q.weight", width, normal},
              {layer + "k.weight", width, normal},
              {layer + "v.weight", width, normal}},
             width),
      matrix("o.weight", block, layer + "o.weight", width, width, normal),
      vector("ffn_norm.weight", block, layer + "ffn_norm.weight", width, ones),
      vector("ffn_norm.bias", block, layer + "ffn_norm.bias", width, zeros),
      matrix("up.weight", block, layer + "up.weight", ffn, width, normal),
      matrix("down.weight", block, layer + "down.weight", width, ffn, normal),
      vector("norm.weight", head, "norm.weight", width, ones),
      vector("norm.bias", head, "norm.bias", width, zeros),
      matrix("classifier.weight", head, "classifier.weight", o_.num_labels, width, normal),
      vector("classifier.bias", head, "classifier.bias", o_.num_labels, zeros),
  };
}

// The input of the micro-batch that a data source gives under the name "pixels", in f32 whatever the precision.
void PatchClassifier::embed(ProgramBuilder& b) const {
  ValueId pixels = b.input("pixels", {Dim::tokens(), o_.patch_values}, DType::f32);
  const DType activation = b.context().activation_dtype;
  if (activation != DType::f32)
    pixels = b.op("cast", {pixels}, "rounded_pixels", {{"dtype", std::string(name_of(activation))}})[0];
  ValueId patches = b.linear(pixels, "patch.weight", "patches", "patch.bias");
  b.output(b.add(patches, b.embedding(b.positions(), "position.weight", "position"), "embedded"));
}

void PatchClassifier::block(ProgramBuilder& b, std::int64_t /*layer*/) const {
  ValueId x = b.stream(o_.hidden_size);
  ValueId normed = b.layer_norm(x, "attn_norm.weight", "attn_norm.bias", o_.layer_norm_eps, "attn_norm");
  double scale = 1 / std::sqrt(static_cast<double>(heads_.head_dim));
  ValueId attended = b.attention(b.linear(normed, "qkv.weight", "qkv"), heads_,
                                 {.mask = AttentionMask::full, .scale = scale}, "attention");
  x = b.add(x, b.linear(attended, "o.weight", "o"), "attn_residual");
  normed = b.layer_norm(x, "ffn_norm.weight", "ffn_norm.bias", o_.layer_norm_eps, "ffn_norm");
  ValueId hidden = b.gelu(b.linear(normed, "up.weight", "up"), Gelu::erf, "gelu");
  b.output(b.add(x, b.linear(hidden, "down.weight", "down"), "ffn_residual"));
}

// One loss for each row, so the input "targets" is (B): one label a row, each below num_labels. The mean of the pooled
// rows, over about 1 / (1 - centre_momentum) steps, is a state of the head, which is subtracted before the classifier.
void PatchClassifier::head(ProgramBuilder& b) const {
  ValueId normed = b.layer_norm(b.stream(o_.hidden_size), "norm.weight", "norm.bias", o_.layer_norm_eps, "norm");
  ValueId pooled = b.op("patch_mean", {normed}, "pooled")[0];
  ValueId mean = b.state({.name = "mean",
                          .extents = {o_.hidden_size},
                          .advance = "advance_mean",
                          .attributes = {{"momentum", o_.centre_momentum}}});
  b.advance_by(mean, b.op("pooled_sums", {pooled}, "pooled_sums")[0]);
  ValueId centred = b.op("centred", {pooled, mean}, "centred")[0];
  ValueId logits = b.linear(centred, "classifier.weight", "logits", "classifier.bias");
  ValueId labels = b.input("targets", {Dim::rows()}, DType::i32, o_.num_labels);
  b.output(b.op("smooth_loss", {logits, labels}, "loss", {{"smoothing", o_.label_smoothing}})[0]);
}

std::string PatchClassifier::hf_config() const {
  OptionValues fields;
  fields.set("patch_values", o_.patch_values);
  fields.set("num_labels", o_.num_labels);
  fields.set("hidden_size", o_.hidden_size);
  fields.set("intermediate_size", o_.intermediate_size);
  fields.set("num_hidden_layers", o_.num_hidden_layers);
  fields.set("num_attention_heads", o_.num_attention_heads);
  fields.set("max_position_embeddings", o_.max_position_embeddings);
  fields.set("layer_norm_eps", o_.layer_norm_eps);
  fields.set("initializer_range", o_.initializer_range);
  fields.set("label_smoothing", o_.label_smoothing);
  fields.set("centre_momentum", o_.centre_momentum);
  return write_hf_config(hf_model(), fields);
}

}  // namespace patch_classifier
