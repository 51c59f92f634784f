#include "vit.h"

#include <cmath>

#include "quern/error.h"

namespace quern::vit {

namespace {

[[noreturn]] void refuse(const char* option, const std::string& what, const std::string& found,
                         const std::string& expected) {
  throw Error(ErrorCode::config,
              {.where = std::string("model.vit.") + option, .what = what, .found = found, .expected = expected});
}

}  // namespace

Vit::Vit(const Options& options) : o_(options) {
  if (o_.embed_dim % o_.num_heads != 0 || o_.embed_dim / o_.num_heads > 256)
    refuse("embed_dim", "does not divide into heads of at most 256", std::to_string(o_.embed_dim),
           "a multiple of " + std::to_string(o_.num_heads) + ", num_heads, and at most 256 times that number");
  if (o_.img_size % o_.patch_size != 0)
    refuse("img_size", "does not divide into patches", std::to_string(o_.img_size),
           "a multiple of " + std::to_string(o_.patch_size) + ", patch_size");
  if (o_.global_pool == "token" && !o_.class_token)
    refuse("global_pool", "there is no class token", "\"token\"", "\"avg\", or class_token = true");
  heads_ = {.heads = o_.num_heads, .kv_heads = o_.num_heads, .head_dim = o_.embed_dim / o_.num_heads};
  patches_ = o_.img_size / o_.patch_size;
  hidden_ = static_cast<std::int64_t>(static_cast<double>(o_.embed_dim) * o_.mlp_ratio);
  if (hidden_ < 1)
    refuse("mlp_ratio", "the feed-forward layer has no width", std::to_string(o_.mlp_ratio), "at least 1 / embed_dim");
  pooled_norm_ = o_.global_pool == "avg" ? "fc_norm" : "norm";
}

ModelTraits Vit::traits() const {
  return {.layers = o_.depth, .width = o_.embed_dim, .max_positions = tokens(), .causal = false, .whole_rows = true};
}

std::vector<ParameterSpec> Vit::parameters() const {
  using enum ParameterGroup;
  const std::int64_t width = o_.embed_dim;
  const Init normal{Init::Kind::normal, 0.02};
  const auto ones = Init::Kind::ones, zeros = Init::Kind::zeros;
  std::vector<ParameterSpec> list;
  auto add_norm = [&](const std::string& name, ParameterGroup group, const std::string& tensor) {
    list.push_back(vector(name + ".weight", group, tensor + ".weight", width, ones));
    list.push_back(vector(name + ".bias", group, tensor + ".bias", width, zeros));
  };
  auto add_linear = [&](const std::string& name, ParameterGroup group, const std::string& tensor, std::int64_t rows,
                        std::int64_t columns, bool bias = true) {
    list.push_back(matrix(name + ".weight", group, tensor + ".weight", rows, columns, normal));
    if (bias) list.push_back(vector(name + ".bias", group, tensor + ".bias", rows, zeros));
  };
  auto add_tokens = [&](const std::string& name, const std::string& tensor, std::int64_t rows, Init init) {
    list.push_back(matrix(name + ".weight", embedding, tensor, rows, width, init));
    list.back().parts[0].shape = {1, rows, width};
    list.back().decay = false;
  };
  add_linear("patch", embedding, "patch_embed.proj", width, patch_values());
  list[0].parts[0].shape = {width, o_.in_chans, o_.patch_size, o_.patch_size};
  list[0].quantized = false;  // it has little work, and 14 x 14 pixels of 3 channels are no multiple of 16
  if (o_.class_token) add_tokens("class_token", "cls_token", 1, {Init::Kind::normal, 1e-6});
  add_tokens("position", "pos_embed", tokens(), normal);
  const std::string layer = "blocks.{layer}.";
  add_norm("attn_norm", block, layer + "norm1");
  add_linear("qkv", block, layer + "attn.qkv", 3 * width, width, o_.qkv_bias);
  list[list.size() - (o_.qkv_bias ? 2 : 1)].parts[0].heads = {{3 * heads_.heads, heads_.head_dim, 1}};
  add_linear("o", block, layer + "attn.proj", width, width);
  add_norm("ffn_norm", block, layer + "norm2");
  add_linear("up", block, layer + "mlp.fc1", hidden_, width);
  add_linear("down", block, layer + "mlp.fc2", width, hidden_);
  add_norm("norm", ParameterGroup::head, pooled_norm_);
  add_linear("classifier", ParameterGroup::head, "head", o_.num_classes, width);
  for (std::size_t i : {1, 2}) list[list.size() - i].parts[0].optional = true;  // weights for other classes
  list[list.size() - 2].quantized = false;  // any number of classes, and a small matmul
  return list;
}

// The convolution of patch_size x patch_size at that stride, as a matmul.
void Vit::embed(ProgramBuilder& b) const {
  Dim patches = Dim::tokens();
  patches.per_row = -prefix();
  const bool bytes = o_.pixels == "u8";
  std::vector<ValueId> pixels{b.input("pixels", {patches, patch_values()}, bytes ? DType::u8 : DType::f32)};
  if (bytes) pixels.push_back(b.input("pixel_scale", {Dim::rows(), 2 * o_.in_chans}, DType::f32));
  if (const DType activation = b.context().activation_dtype; bytes || activation != DType::f32)
    pixels = b.op("cast", pixels, "rounded_pixels", {{"dtype", std::string(name_of(activation))}});
  ValueId x = b.linear(pixels[0], "patch.weight", "patches", "patch.bias");
  if (o_.class_token) x = b.prepend(x, "class_token.weight", "with_class_token");
  b.output(
      b.add(x, b.embedding(b.input("positions", {Dim::tokens()}, DType::i32, tokens()), "position.weight", "position"),
            "embedded"));
}

void Vit::block(ProgramBuilder& b, std::int64_t /*layer*/) const {
  ValueId x = b.stream(o_.embed_dim);
  ValueId normed = b.layer_norm(x, "attn_norm.weight", "attn_norm.bias", o_.layer_norm_eps, "attn_norm");
  const double scale = 1 / std::sqrt(static_cast<double>(heads_.head_dim));
  ValueId attended = b.attention(b.linear(normed, "qkv.weight", "qkv", o_.qkv_bias ? "qkv.bias" : ""), heads_,
                                 {.mask = AttentionMask::full, .scale = scale}, "attention");
  x = b.add(x, b.linear(attended, "o.weight", "o", "o.bias"), "attn_residual");
  normed = b.layer_norm(x, "ffn_norm.weight", "ffn_norm.bias", o_.layer_norm_eps, "ffn_norm");
  ValueId hidden = b.gelu(b.linear(normed, "up.weight", "up", "up.bias"), Gelu::erf, "gelu");
  b.output(b.add(x, b.linear(hidden, "down.weight", "down", "down.bias"), "ffn_residual"));
}

// timm norms all tokens and then takes the class token, which is the same.
void Vit::head(ProgramBuilder& b) const {
  const bool token = o_.global_pool == "token";
  ValueId pooled = b.row_mean(b.stream(o_.embed_dim), token ? 0 : prefix(), token ? 1 : 0, "pooled");
  ValueId normed = b.layer_norm(pooled, "norm.weight", "norm.bias", o_.layer_norm_eps, "norm");
  ValueId logits = b.linear(normed, "classifier.weight", "logits", "classifier.bias");
  ValueId loss =
      b.class_loss(logits, b.input("targets", {Dim::rows()}, DType::i32, o_.num_classes), o_.label_smoothing);
  if (o_.weighted) loss = b.weigh(loss, b.input("weights", {Dim::rows()}, DType::f32), "weighted_loss");
  b.output(loss);
}

std::string Vit::hf_config() const {
  OptionValues fields;
  fields.set("img_size", o_.img_size);
  fields.set("patch_size", o_.patch_size);
  fields.set("in_chans", o_.in_chans);
  fields.set("num_classes", o_.num_classes);
  fields.set("embed_dim", o_.embed_dim);
  fields.set("depth", o_.depth);
  fields.set("num_heads", o_.num_heads);
  fields.set("mlp_ratio", o_.mlp_ratio);
  fields.set("qkv_bias", o_.qkv_bias);
  fields.set("class_token", o_.class_token);
  fields.set("global_pool", o_.global_pool);
  fields.set("layer_norm_eps", o_.layer_norm_eps);
  fields.set("label_smoothing", o_.label_smoothing);
  fields.set("weighted", o_.weighted);
  fields.set("pixels", o_.pixels);
  return write_hf_config(hf_model(), fields);
}

}  // namespace quern::vit
