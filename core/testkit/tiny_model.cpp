#include "quern/testkit/tiny_model.h"

#include <cmath>

namespace quern::testkit {

std::vector<ParameterSpec> TinyModel::parameters() const {
  using enum ParameterGroup;
  std::vector<ParameterSpec> list;
  std::int64_t packed_rows = (o_.heads + 2 * o_.kv_heads) * o_.head_dim;
  auto add_norm = [&](const std::string& name, ParameterGroup group, const std::string& hf) {
    list.push_back(vector(name + ".weight", group, hf + ".weight", o_.width, Init::Kind::ones));
    if (o_.layer_norm) list.push_back(vector(name + ".bias", group, hf + ".bias", o_.width, Init::Kind::zeros));
  };
  list.push_back(matrix("embedding.weight", embedding, "embed.weight", o_.vocabulary, o_.width, {.deviation = 0.5}));
  add_norm("attn_norm", block, "layers.{layer}.attn_norm");
  list.push_back(matrix("qkv.weight", block, "layers.{layer}.qkv.weight", packed_rows, o_.width, {.deviation = 0.3}));
  list.back().parts[0].heads = {{o_.heads, o_.head_dim, o_.heads / o_.kv_heads}, {2 * o_.kv_heads, o_.head_dim, 1}};
  if (o_.bias) list.push_back(vector("qkv.bias", block, "layers.{layer}.qkv.bias", packed_rows, Init::Kind::zeros));
  if (o_.head_norm) {
    list.push_back(vector("q_norm.weight", block, "layers.{layer}.q_norm.weight", o_.head_dim, Init::Kind::ones));
    list.push_back(vector("k_norm.weight", block, "layers.{layer}.k_norm.weight", o_.head_dim, Init::Kind::ones));
  }
  list.push_back(
      matrix("o.weight", block, "layers.{layer}.o.weight", o_.width, o_.heads * o_.head_dim, {.deviation = 0.3}));
  add_norm("ffn_norm", block, "layers.{layer}.ffn_norm");
  list.push_back(matrix("up.weight", block, "layers.{layer}.up.weight", o_.layer_norm ? o_.ffn : 2 * o_.ffn, o_.width,
                        {.deviation = 0.3}));
  list.push_back(matrix("down.weight", block, "layers.{layer}.down.weight", o_.width, o_.ffn, {.deviation = 0.3}));
  add_norm("final_norm", head, "final_norm");
  if (!o_.tied)
    list.push_back(matrix("lm_head.weight", head, "lm_head.weight", o_.vocabulary, o_.width, {.deviation = 0.3}));
  for (ParameterSpec& spec : list)
    for (const std::string& name : o_.frozen)
      if (spec.name.starts_with(name)) spec.trainable = false;
  return list;
}

ValueId TinyModel::norm(ProgramBuilder& b, ValueId x, const std::string& name) const {
  if (o_.layer_norm) return b.layer_norm(x, name + ".weight", name + ".bias", 1e-5, name);
  return b.rms_norm(x, name + ".weight", 1e-6, name);
}

void TinyModel::embed(ProgramBuilder& b) const { b.output(b.embedding(b.tokens(), "embedding.weight")); }

void TinyModel::block(ProgramBuilder& b, std::int64_t layer) const {
  HeadLayout heads{o_.heads, o_.kv_heads, o_.head_dim};
  ValueId x = b.stream(o_.width);
  ValueId qkv = b.linear(norm(b, x, "attn_norm"), "qkv.weight", "qkv", o_.bias ? "qkv.bias" : "");
  if (o_.head_norm) qkv = b.head_norm(qkv, heads, "q_norm.weight", "k_norm.weight", 1e-6, "qk_norm");
  qkv = b.rope(qkv, heads, rope_frequencies({}, o_.head_dim), "rope");
  ValueId attention = b.attention(
      qkv, heads,
      {.window = block_kind(layer) == 1 ? o_.window : 0, .scale = 1.0 / std::sqrt(static_cast<double>(o_.head_dim))},
      "attention");
  ValueId o = b.linear(attention, "o.weight", "o");
  if (!o_.parallel) x = b.add(x, o, "attn_sum");
  ValueId up = b.linear(norm(b, x, "ffn_norm"), "up.weight", "up");
  ValueId activated = o_.layer_norm ? b.gelu(up, o_.gelu, "activated") : b.swiglu(up, "activated");
  ValueId down = b.linear(activated, "down.weight", "down");
  b.output(b.add(x, o_.parallel ? b.add(o, down, "both") : down, "ffn_sum"));
}

void TinyModel::head(ProgramBuilder& b) const {
  ValueId x = norm(b, b.stream(o_.width), "final_norm");
  b.output(b.lm_loss(x, o_.tied ? "embedding.weight" : "lm_head.weight"));
}

void PlainPrecision::lower(const ProductSite& site, Lowering& lowering) const { lower_to_matmul(site, lowering); }

}  // namespace quern::testkit
