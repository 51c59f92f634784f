#include "shared/decoder/decoder.h"

namespace quern::decoder {

namespace {

/// The tensors of a packed parameter, in order: as many as `rows`, or one that has the rows of all.
std::vector<ParameterPart> parts_of(const std::string& prefix, const std::vector<std::string>& tensors,
                                    const std::vector<std::int64_t>& rows, const std::string& suffix,
                                    const Init& init) {
  std::vector<ParameterPart> parts;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i < tensors.size())
      parts.push_back({.hf_name = prefix + tensors[i] + suffix, .rows = rows[i], .init = init});
    else
      parts.back().rows += rows[i];
  }
  return parts;
}

std::string bias(bool has, const char* name) { return has ? name : ""; }

}  // namespace

ModelTraits Decoder::traits() const {
  return {.layers = d_.layers, .width = d_.width, .vocabulary = d_.vocabulary, .max_positions = d_.max_positions};
}

std::vector<ParameterSpec> Decoder::parameters() const {
  using enum ParameterGroup;
  const Names& n = d_.names;
  const std::int64_t q = d_.heads.heads * d_.heads.head_dim, kv = d_.heads.kv_heads * d_.heads.head_dim;
  const Init normal{Init::Kind::normal, d_.init_deviation}, zeros{Init::Kind::zeros, 0.0};
  std::vector<ParameterSpec> list;
  auto add_norm = [&](const std::string& name, ParameterGroup group, const std::string& prefix,
                      const std::string& tensor, std::int64_t size) {
    if (tensor.empty()) return;
    list.push_back(vector(name + ".weight", group, prefix + tensor + ".weight", size, Init::Kind::ones));
    if (d_.norm == NormKind::layer)
      list.push_back(vector(name + ".bias", group, prefix + tensor + ".bias", size, Init::Kind::zeros));
  };
  // Query, key and value (gate and up) are one stored matrix, so that each is one matmul.
  auto add_projection = [&](const std::string& name, const std::vector<std::string>& tensors,
                            const std::vector<std::int64_t>& rows, std::int64_t columns, bool has_bias) {
    list.push_back(packed(name + ".weight", block, parts_of(n.layer, tensors, rows, ".weight", normal), columns));
    if (has_bias) list.push_back(packed(name + ".bias", block, parts_of(n.layer, tensors, rows, ".bias", zeros), 1));
  };
  list.push_back(matrix("embedding.weight", embedding, n.embedding + ".weight", d_.vocabulary, d_.width, normal));
  add_norm("attn_norm", block, n.layer, n.attn_norm, d_.width);
  add_projection("qkv", n.qkv, {q, kv, kv}, d_.width, d_.biases.qkv);
  if (d_.qk_norm != QkNorm::none) {
    add_norm("q_norm", block, n.layer, n.q_norm, d_.heads.head_dim);
    add_norm("k_norm", block, n.layer, n.k_norm, d_.heads.head_dim);
  }
  add_projection("o", {n.o}, {d_.width}, q, d_.biases.o);
  add_norm("attn_after_norm", block, n.layer, n.attn_after_norm, d_.width);
  add_norm("ffn_norm", block, n.layer, n.ffn_norm, d_.width);
  add_projection("gate_up", n.gate_up, {d_.ffn, d_.ffn}, d_.width, d_.biases.gate_up);
  add_projection("down", {n.down}, {d_.width}, d_.ffn, d_.biases.down);
  add_norm("ffn_after_norm", block, n.layer, n.ffn_after_norm, d_.width);
  add_norm("final_norm", head, "", n.final_norm, d_.width);
  if (!d_.tied) list.push_back(matrix("lm_head.weight", head, n.head + ".weight", d_.vocabulary, d_.width, normal));
  return list;
}

ValueId Decoder::norm(ProgramBuilder& b, ValueId x, const std::string& hf_name, const std::string& name) const {
  if (hf_name.empty()) return x;
  if (d_.norm == NormKind::layer) return b.layer_norm(x, name + ".weight", name + ".bias", d_.eps, name);
  return b.rms_norm(x, name + ".weight", d_.eps, name);
}

void Decoder::embed(ProgramBuilder& b) const { b.output(b.embedding(b.tokens(), "embedding.weight")); }

void Decoder::block(ProgramBuilder& b) const {
  const Names& n = d_.names;
  ValueId x = b.stream(d_.width);

  ValueId normed = norm(b, x, n.attn_norm, "attn_norm");
  ValueId qkv = b.linear(normed, "qkv.weight", "qkv", bias(d_.biases.qkv, "qkv.bias"));
  if (d_.qk_norm == QkNorm::head) qkv = b.head_norm(qkv, d_.heads, "q_norm.weight", "k_norm.weight", d_.eps, "qk_norm");
  qkv = b.rope(qkv, d_.heads, d_.rope, "rotated");
  ValueId attended = b.attention(qkv, d_.heads, AttentionMask::causal, d_.attention_scale, "attention");
  ValueId o = b.linear(attended, "o.weight", "o", bias(d_.biases.o, "o.bias"));
  x = b.add(x, norm(b, o, n.attn_after_norm, "attn_after_norm"), "attn_residual");

  normed = norm(b, x, n.ffn_norm, "ffn_norm");
  ValueId gate_up = b.linear(normed, "gate_up.weight", "gate_up", bias(d_.biases.gate_up, "gate_up.bias"));
  ValueId gated = b.swiglu(gate_up, "swiglu");
  ValueId down = b.linear(gated, "down.weight", "down", bias(d_.biases.down, "down.bias"));
  b.output(b.add(x, norm(b, down, n.ffn_after_norm, "ffn_after_norm"), "ffn_residual"));
}

void Decoder::head(ProgramBuilder& b) const {
  ValueId normed = norm(b, b.stream(d_.width), d_.names.final_norm, "final_norm");
  b.output(b.lm_loss(normed, d_.tied ? "embedding.weight" : "lm_head.weight"));
}

}  // namespace quern::decoder
