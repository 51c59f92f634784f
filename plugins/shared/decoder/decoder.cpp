#include "shared/decoder/decoder.h"

namespace quern::decoder {

namespace {

/// The order of a head's rows in which the pairs of the first `rotated` elements are half a head apart.
std::vector<std::int32_t> order_of_head(std::int64_t head_dim, std::int64_t rotated, RopePairs pairs) {
  if (rotated == head_dim && pairs == RopePairs::halves) return {};
  std::vector<std::int32_t> order(static_cast<std::size_t>(head_dim));
  const std::int64_t half = head_dim / 2, turned = rotated / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const bool adjacent = pairs == RopePairs::adjacent || i >= turned;  // the others may have any order
    order[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(adjacent ? 2 * i : i);
    order[static_cast<std::size_t>(half + i)] = static_cast<std::int32_t>(adjacent ? 2 * i + 1 : turned + i);
  }
  return order;
}

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

/// Marks the heads of a projection of queries, keys and values, which are one tensor or three.
void mark_heads(std::vector<ParameterPart>& parts, const HeadLayout& h) {
  const std::vector<HeadRows> queries{{h.heads, h.head_dim, h.heads / h.kv_heads}}, keys{{h.kv_heads, h.head_dim, 1}};
  if (parts.size() == 1)
    parts[0].heads = {queries[0], keys[0], keys[0]};
  else
    parts[0].heads = queries, parts[1].heads = parts[2].heads = keys;
}

std::string bias(bool has, const char* name) { return has ? name : ""; }

}  // namespace

Decoder::Decoder(Description description) : d_(std::move(description)) {
  for (LayerForm& form : d_.forms) {
    if (!form.rope) continue;
    const auto pairs = static_cast<std::int64_t>(form.rope->inverse.size());
    head_order_ = order_of_head(d_.heads.head_dim, 2 * pairs, d_.rope_pairs);
    for (std::vector<double>* inverse : {&form.rope->inverse, &form.long_inverse})
      if (!inverse->empty()) inverse->resize(static_cast<std::size_t>(d_.heads.head_dim / 2), 0.0);
  }
}

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
    list.back().parts[0].offset = d_.norm_offset;
    if (d_.norm == NormKind::layer)
      list.push_back(vector(name + ".bias", group, prefix + tensor + ".bias", size, Init::Kind::zeros));
  };
  // Query, key and value (gate and up) are one stored matrix, so that each is one matmul.
  auto add_projection = [&](const std::string& name, const std::vector<std::string>& tensors,
                            const std::vector<std::int64_t>& rows, std::int64_t columns, bool has_bias) {
    list.push_back(packed(name + ".weight", block, parts_of(n.layer, tensors, rows, ".weight", normal), columns));
    for (ParameterPart& part : list.back().parts) part.transposed = n.transposed;
    if (has_bias) list.push_back(packed(name + ".bias", block, parts_of(n.layer, tensors, rows, ".bias", zeros), 1));
  };
  // Rows of queries and keys, whose parts come first.
  auto order_heads = [&](ParameterSpec& spec) {
    if (head_order_.empty()) return;
    if (spec.parts.size() > 1) {
      spec.parts[0].row_order = spec.parts[1].row_order = head_order_;
      return;
    }
    std::vector<std::int32_t>& order = spec.parts[0].row_order;
    for (std::int64_t row = 0; row < spec.parts[0].rows; ++row) {
      const std::int64_t at = row % d_.heads.head_dim;
      order.push_back(
          static_cast<std::int32_t>(row < q + kv ? row - at + head_order_[static_cast<std::size_t>(at)] : row));
    }
  };
  list.push_back(matrix("embedding.weight", embedding, n.embedding + ".weight", d_.vocabulary, d_.width, normal));
  if (!n.positions.empty())
    list.push_back(matrix("positions.weight", embedding, n.positions + ".weight", d_.max_positions, d_.width, normal));
  add_norm("attn_norm", block, n.layer, n.attn_norm, d_.width);
  const std::size_t first = list.size();
  add_projection("qkv", n.qkv, {q, kv, kv}, d_.width, d_.biases.qkv);
  if (d_.qk_norm != QkNorm::none) {
    const bool head = d_.qk_norm == QkNorm::head;
    add_norm("q_norm", block, n.layer, n.q_norm, head ? d_.heads.head_dim : q);
    add_norm("k_norm", block, n.layer, n.k_norm, head ? d_.heads.head_dim : kv);
  }
  for (std::size_t i = first; i < list.size(); ++i)
    if (list[i].name.starts_with("qkv.")) {
      order_heads(list[i]);
      mark_heads(list[i].parts, d_.heads);
    } else {
      list[i].parts[0].row_order = head_order_;  // norms of queries and keys
    }
  add_projection("o", {n.o}, {d_.width}, q, d_.biases.o);
  add_norm("attn_after_norm", block, n.layer, n.attn_after_norm, d_.width);
  add_norm("ffn_norm", block, n.layer, n.ffn_norm, d_.width);
  if (d_.gated())
    add_projection("gate_up", n.gate_up, {d_.ffn, d_.ffn}, d_.width, d_.biases.gate_up);
  else
    add_projection("up", n.gate_up, {d_.ffn}, d_.width, d_.biases.gate_up);
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

ValueId Decoder::activation(ProgramBuilder& b, ValueId x) const {
  switch (d_.activation) {
    case Activation::swiglu: return b.swiglu(x, "swiglu");
    case Activation::geglu: return b.geglu(x, "geglu");
    case Activation::gelu_erf: return b.gelu(x, Gelu::erf, "gelu");
    case Activation::gelu_tanh: break;
  }
  return b.gelu(x, Gelu::tanh, "gelu");
}

void Decoder::embed(ProgramBuilder& b) const {
  ValueId x = b.embedding(b.tokens(), "embedding.weight");
  if (d_.embedding_scale != 1) x = b.scale(x, d_.embedding_scale, "scaled");
  if (!d_.names.positions.empty())
    x = b.add(x, b.embedding(b.positions(), "positions.weight", "embedded_positions"), "sum");
  b.output(x);
}

ValueId Decoder::rotated(ProgramBuilder& b, ValueId qkv, const LayerForm& form) const {
  if (form.long_inverse.empty()) return b.rope(qkv, d_.heads, *form.rope, "rotated");
  const Attributes attributes{{"heads", d_.heads.heads},
                              {"kv_heads", d_.heads.kv_heads},
                              {"head_dim", d_.heads.head_dim},
                              {"inverse_frequencies", form.rope->inverse},
                              {"long_inverse_frequencies", form.long_inverse},
                              {"long_beyond", form.long_beyond},
                              {"magnitude", form.rope->magnitude}};
  return b.op("rope", {qkv, b.positions()}, "rotated", attributes)[0];
}

void Decoder::block(ProgramBuilder& b, std::int64_t layer) const {
  const Names& n = d_.names;
  const LayerForm& form = d_.forms[static_cast<std::size_t>(d_.form(layer))];
  ValueId x = b.stream(d_.width);

  ValueId normed = norm(b, x, n.attn_norm, "attn_norm");
  ValueId qkv = b.linear(normed, "qkv.weight", "qkv", bias(d_.biases.qkv, "qkv.bias"));
  if (d_.qk_norm != QkNorm::none) qkv = b.head_norm(qkv, d_.heads, "q_norm.weight", "k_norm.weight", d_.eps, "qk_norm");
  if (form.rope) qkv = rotated(b, qkv, form);
  ValueId attended = b.attention(
      qkv, d_.heads, {.window = form.window, .cap = d_.attention_cap, .scale = d_.attention_scale}, "attention");
  ValueId o = b.linear(attended, "o.weight", "o", bias(d_.biases.o, "o.bias"));
  x = b.add(x, norm(b, o, n.attn_after_norm, "attn_after_norm"), "attn_residual");

  normed = norm(b, x, n.ffn_norm, "ffn_norm");
  const std::string up = d_.gated() ? "gate_up" : "up";
  ValueId hidden = activation(b, b.linear(normed, up + ".weight", up, bias(d_.biases.gate_up, (up + ".bias").c_str())));
  ValueId down = b.linear(hidden, "down.weight", "down", bias(d_.biases.down, "down.bias"));
  b.output(b.add(x, norm(b, down, n.ffn_after_norm, "ffn_after_norm"), "ffn_residual"));
}

void Decoder::head(ProgramBuilder& b) const {
  ValueId normed = norm(b, b.stream(d_.width), d_.names.final_norm, "final_norm");
  b.output(b.lm_loss(normed, d_.tied ? "embedding.weight" : "lm_head.weight", "token_loss", d_.logit_cap));
}

}  // namespace quern::decoder
