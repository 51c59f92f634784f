#include <cmath>

#include "bench.h"
#include "quern/rope.h"

namespace quern::cuda::bench {

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;

void add_norms(std::vector<Case>& cases, const ModelShape& m) {
  const std::int64_t n = m.geometry.tokens();
  const Extents x{n, m.width}, w{m.width}, row{n};
  auto label = [&](const std::string& kind) { return kind + " " + to_string(x); };
  auto b = [](const Extents& extents) { return normal(kBf16, extents); };
  const BenchOperand statistic = normal(kF32, row);
  const Operand stream = operand(kBf16, x), stats = operand(kF32, row), gradient = operand(kBf16, w, true);
  const Attributes eps{{"eps", 1e-6}};
  auto add = [&](const std::string& kind, std::vector<BenchOperand> inputs, std::vector<Operand> outputs,
                 Attributes attributes = {}) {
    cases.push_back({label(kind), kind, std::move(inputs), std::move(outputs), std::move(attributes), m.geometry});
  };
  add("add", {b(x), b(x)}, {stream});
  add("rms_norm", {b(x), b(w)}, {stream, stats}, eps);
  add("add_rms_norm", {b(x), b(x), b(w)}, {stream, stream, stats}, eps);
  add("rms_norm_grad", {b(x), b(x), b(w), statistic}, {stream, gradient});
  add("rms_norm_grad_add", {b(x), b(x), b(w), statistic, b(x)}, {stream, gradient, stream});
  cases.back().outputs[0].present = false;  // only the sum is read, as in training
  add("layer_norm", {b(x), b(w), b(w)}, {stream, stats, stats}, eps);
  add("layer_norm_grad", {b(x), b(x), b(w), statistic, statistic}, {stream, gradient, gradient});
  add("layer_norm_grad_add", {b(x), b(x), b(w), statistic, statistic, b(x)}, {stream, gradient, gradient, stream});
  cases.back().outputs[0].present = false;
  add("sum_squares", {b(x)}, {operand(DType::f64, {1})});
}

void add_elementwise(std::vector<Case>& cases, const ModelShape& m) {
  const std::int64_t n = m.geometry.tokens();
  const Extents half{n, m.ffn}, packed{n, 2 * m.ffn}, qkv{n, m.qkv()};
  auto b = [](const Extents& extents) { return normal(kBf16, extents); };
  auto add = [&](const std::string& kind, const Extents& shown, std::vector<BenchOperand> inputs,
                 std::vector<Operand> outputs, Attributes attributes = {}) {
    cases.push_back({kind + " " + to_string(shown), kind, std::move(inputs), std::move(outputs), std::move(attributes),
                     m.geometry});
  };
  const Attributes tanh{{"approximation", std::string("tanh")}};
  add("swiglu", packed, {b(packed)}, {operand(kBf16, half)});
  add("swiglu_grad", packed, {b(half), b(packed)}, {operand(kBf16, packed)});
  add("swiglu_and_grad", packed, {b(packed), b(half)}, {operand(kBf16, half), operand(kBf16, packed)});
  add("gelu", half, {b(half)}, {operand(kBf16, half)}, tanh);
  add("gelu_grad", half, {b(half), b(half)}, {operand(kBf16, half)}, tanh);
  add("column_sum", qkv, {b(qkv)}, {operand(kBf16, {m.qkv()}, true)});
}

void add_heads(std::vector<Case>& cases, const ModelShape& m) {
  const std::int64_t n = m.geometry.tokens();
  const Extents qkv{n, m.qkv()}, w{m.head_dim};
  const BenchOperand positions{operand(DType::i32, {n}), Fill::positions, m.geometry.sequence};
  const RopeFrequencies frequencies = rope_frequencies({}, m.head_dim);
  Attributes heads{{"heads", m.heads}, {"kv_heads", m.kv_heads}, {"head_dim", m.head_dim}};
  Attributes rope = heads, norm = heads, both = heads;
  for (Attributes* attributes : {&rope, &both}) {
    attributes->set("inverse_frequencies", frequencies.inverse);
    attributes->set("magnitude", frequencies.magnitude);
  }
  for (Attributes* attributes : {&norm, &both}) attributes->set("eps", 1e-6);
  auto b = [](const Extents& extents) { return normal(kBf16, extents); };
  const std::string shown = " " + to_string(qkv) + " heads of " + std::to_string(m.head_dim);
  const Operand packed = operand(kBf16, qkv), rstd = operand(kF32, {n, m.heads + m.kv_heads}),
                gradient = operand(kBf16, w, true);
  auto add = [&](const std::string& kind, const std::string& label, std::vector<BenchOperand> inputs,
                 std::vector<Operand> outputs, const Attributes& attributes) {
    cases.push_back({kind + label, kind, std::move(inputs), std::move(outputs), attributes, m.geometry});
  };
  add("rope", shown, {b(qkv), positions}, {packed}, rope);
  add("rope", shown + " in place", {b(qkv), positions}, {packed}, rope);
  cases.back().in_place = {{0, 0}};
  add("rope_grad", shown, {b(qkv), positions}, {packed}, rope);
  add("rope_grad_column_sum", shown, {b(qkv), positions}, {packed, operand(kBf16, {m.qkv()}, true)}, rope);
  add("head_norm", shown, {b(qkv), b(w), b(w)}, {packed, rstd}, norm);
  add("head_norm_rope", shown, {b(qkv), b(w), b(w), positions}, {packed, rstd, packed}, both);
  cases.back().outputs[0].present = false;
  add("head_norm_grad", shown, {b(qkv), b(qkv), b(w), b(w), {rstd}}, {packed, gradient, gradient}, norm);
  add("rope_grad_head_norm_grad", shown, {b(qkv), positions, b(qkv), b(w), b(w), {rstd}},
      {packed, packed, gradient, gradient}, both);
  cases.back().outputs[0].present = false;
  cases.push_back(attention_case(m, false, 0));
  cases.push_back(attention_case(m, true, 0));
  cases.push_back(attention_case(m, true, m.geometry.batch));
}

/// Gradient, master and moments of each extents; one update of all.
Case adamw_case(const std::string& label, const std::vector<Extents>& tensors, DType master, DType moments) {
  Case adamw{label, "adamw", {{operand(kF32, {4}), Fill::update}, {operand(DType::u32, {16}), Fill::step}}, {}};
  std::vector<double> objects;
  for (const Extents& extents : tensors) {
    for (int i = 0; i < 3; ++i) {
      adamw.in_place.push_back({static_cast<int>(adamw.outputs.size()), static_cast<int>(adamw.inputs.size()) + 1 + i});
      adamw.outputs.push_back(operand(i == 0 ? master : moments, extents));
    }
    adamw.inputs.push_back(normal(kBf16, extents));
    adamw.inputs.push_back(normal(master, extents));
    adamw.inputs.push_back(normal(moments, extents));
    adamw.inputs.push_back({operand(moments, extents), Fill::positive});
    objects.push_back(static_cast<double>(objects.size()));
  }
  adamw.attributes = {{"beta1", 0.9}, {"beta2", 0.95}, {"eps", 1e-8}, {"weight_decay", 0.1}};
  adamw.attributes.set("offsets", std::vector<double>(tensors.size(), 0.0));
  adamw.attributes.set("objects", std::move(objects));
  return adamw;
}

/// The same with moments in 8 bits, in blocks of 128 or 256 of a row.
Case adamw_8bit_case(const Extents& extents, DType master, DType moments, std::int64_t block) {
  Case adamw{"adamw_8bit " + to_string(extents) + " master " + std::string(name_of(master)) + ", moments " +
                 std::string(name_of(moments)) + " in " + std::to_string(block),
             "adamw_8bit",
             {{operand(kF32, {4}), Fill::update}, {operand(DType::u32, {16}), Fill::step}},
             {}};
  const Extents scales{extents[0], (extents[1] + block - 1) / block};
  adamw.inputs.push_back(normal(kBf16, extents));
  for (const BenchOperand& updated :
       {normal(master, extents), normal(moments, extents), BenchOperand{operand(moments, extents), Fill::positive},
        BenchOperand{operand(kF32, scales), Fill::positive}, BenchOperand{operand(kF32, scales), Fill::positive}}) {
    adamw.in_place.push_back({static_cast<int>(adamw.outputs.size()), static_cast<int>(adamw.inputs.size())});
    adamw.inputs.push_back(updated);
    adamw.outputs.push_back(updated.operand);
  }
  adamw.attributes = {{"beta1", 0.9}, {"beta2", 0.95}, {"eps", 1e-8}, {"weight_decay", 0.1}, {"block", block}};
  for (const char* zeros : {"offsets", "objects"}) adamw.attributes.set(zeros, std::vector<double>(1, 0.0));
  return adamw;
}

void add_optimizer(std::vector<Case>& cases, const Extents& extents) {
  for (DType moments : {DType::i8, DType::e4m3})
    for (std::int64_t block : {128, 256}) cases.push_back(adamw_8bit_case(extents, kBf16, moments, block));
  for (DType moments : {kBf16, kF32})
    for (DType master : {kBf16, kF32})
      cases.push_back(adamw_case("adamw " + to_string(extents) + " master " + std::string(name_of(master)) +
                                     ", moments " + std::string(name_of(moments)),
                                 {extents}, master, moments));
}

/// The update of a whole model with a tied embedding, bf16 everything.
void add_update(std::vector<Case>& cases, const ModelShape& m) {
  std::vector<Extents> matrices{{m.vocabulary, m.width}}, vectors{{m.width}};
  for (std::int64_t layer = 0; layer < m.layers; ++layer) {
    for (const Extents& extents : {Extents{m.qkv(), m.width}, Extents{m.width, m.heads * m.head_dim},
                                   Extents{2 * m.ffn, m.width}, Extents{m.width, m.ffn}})
      matrices.push_back(extents);
    for (std::int64_t size : {m.width, m.width, m.qkv()}) vectors.push_back({size});
  }
  std::vector<Extents> all = matrices;
  all.insert(all.end(), vectors.begin(), vectors.end());
  auto label = [&](const char* kind, const std::vector<Extents>& tensors) {
    return std::string(kind) + " update " + m.name + ", " + std::to_string(tensors.size()) + " tensors";
  };
  const Operand sums = operand(DType::f64, Extents{static_cast<std::int64_t>(all.size())});
  Case squares{label("sum_squares", all), "sum_squares", {}, {sums}};
  for (const Extents& extents : all) squares.inputs.push_back(normal(kBf16, extents));
  cases.push_back(std::move(squares));
  cases.push_back(adamw_case(label("adamw", matrices), matrices, kBf16, kBf16));
  cases.push_back(adamw_case(label("adamw", vectors), vectors, kBf16, kBf16));
}

void add_embedding(std::vector<Case>& cases, const ModelShape& m) {
  const std::int64_t n = m.geometry.tokens();
  const Extents x{n, m.width}, table{m.vocabulary, m.width};
  const BenchOperand tokens{operand(DType::i32, {n}), Fill::tokens, m.vocabulary};
  cases.push_back({"embedding " + to_string(x), "embedding", {tokens, normal(kBf16, table)}, {operand(kBf16, x)}});
  cases.push_back({"embedding_grad " + to_string(x),
                   "embedding_grad",
                   {normal(kBf16, x), tokens},
                   {operand(kBf16, table, true)},
                   {{"rows", m.vocabulary}}});
}

/// The three matmuls of y = x W^T, W (out, in), over n tokens; weight gradients accumulate.
void add_products(std::vector<Case>& cases, const std::string& name, std::int64_t n, std::int64_t out,
                  std::int64_t in) {
  const double flops = 2.0 * static_cast<double>(n) * static_cast<double>(out) * static_cast<double>(in);
  auto b = [](Extents extents) { return normal(kBf16, std::move(extents)); };
  auto add = [&](const char* product, BenchOperand left, BenchOperand right, Operand y, std::int64_t ta,
                 std::int64_t tb) {
    Case matmul{"matmul " + name + " " + product,
                "matmul",
                {std::move(left), std::move(right), {}, {}, {}},
                {std::move(y)},
                {{"transpose_a", ta}, {"transpose_b", tb}}};
    matmul.flops = flops;
    cases.push_back(std::move(matmul));
  };
  add("output", b({n, in}), b({out, in}), operand(kBf16, {n, out}), 0, 1);
  add("input gradient", b({n, out}), b({out, in}), operand(kBf16, {n, in}), 0, 0);
  add("weight gradient", b({n, out}), b({n, in}), operand(kBf16, {out, in}, true), 1, 0);
}

void add_model_products(std::vector<Case>& cases, const ModelShape& m) {
  const std::int64_t n = m.geometry.tokens();
  add_products(cases, m.name + " qkv", n, m.qkv(), m.width);
  add_products(cases, m.name + " o", n, m.width, m.heads * m.head_dim);
  add_products(cases, m.name + " up", n, 2 * m.ffn, m.width);
  add_products(cases, m.name + " down", n, m.width, m.ffn);
}

}  // namespace

Case attention_case(const ModelShape& m, bool backward, std::int64_t chunk) {
  const std::int64_t n = m.geometry.tokens();
  const Operand packed = operand(kBf16, {n, m.qkv()}), out = operand(kBf16, {n, m.heads * m.head_dim}),
                statistics = operand(kF32, {n, m.heads});
  Case c;
  c.kind = backward ? "attention_grad" : "attention";
  c.label = c.kind + " " + to_string(packed.extents) + " heads of " + std::to_string(m.head_dim) + " T " +
            std::to_string(m.geometry.sequence);
  if (backward)
    c.inputs = {{out}, {packed}, {out}, {statistics}, {}}, c.outputs = {packed};
  else
    c.inputs = {{packed}, {}}, c.outputs = {out, statistics};
  c.attributes = {{"heads", m.heads},
                  {"kv_heads", m.kv_heads},
                  {"head_dim", m.head_dim},
                  {"mask", std::string("causal")},
                  {"scale", 1.0 / std::sqrt(static_cast<double>(m.head_dim))}};
  if (chunk > 0) {
    c.attributes.set("chunk", chunk);
    c.label += " in cuDNN's chunks of " + std::to_string(chunk);
  }
  c.geometry = m.geometry;
  // Causal: half of the pairs; two matmuls forward, five backward.
  const double pairs = static_cast<double>(n) * static_cast<double>(m.geometry.sequence) / 2;
  c.flops = (backward ? 5 : 2) * 2 * pairs * static_cast<double>(m.heads * m.head_dim);
  return c;
}

Case loss_case(const ModelShape& m, std::int64_t chunk, bool input_gradient, bool weight_gradient) {
  const std::int64_t n = m.geometry.tokens();
  const Extents x{n, m.width}, weight{m.vocabulary, m.width};
  Case loss{"lm_loss_train " + m.name,
            "lm_loss_train",
            {normal(kBf16, x), normal(kBf16, weight), {operand(DType::i32, {n}), Fill::tokens, m.vocabulary}},
            {operand(kF32, {n}), operand(kBf16, x), operand(kBf16, weight, true)}};
  loss.outputs[1].present = input_gradient;
  loss.outputs[2].present = weight_gradient;
  if (chunk > 0) loss.attributes.set("chunk", chunk);
  loss.geometry = m.geometry;
  loss.flops = (1 + int{input_gradient} + int{weight_gradient}) * 2.0 * static_cast<double>(n * m.width) *
               static_cast<double>(m.vocabulary);
  return loss;
}

std::vector<Case> all_cases() {
  const ModelShape small{"0.5B", {32, 1024}, 24, 896, 4864, 14, 2, 64, 151936};
  const ModelShape medium{"1.5B", {32, 1024}, 28, 1536, 8960, 12, 2, 128, 151936};
  const ModelShape large{"7B", {16, 1024}, 28, 3584, 18944, 28, 4, 128, 152064};
  const ModelShape few{"7B (4k)", {4, 1024}, 28, 3584, 18944, 28, 4, 128, 152064};
  std::vector<Case> cases;
  for (const ModelShape& m : {small, large}) {
    add_norms(cases, m);
    add_elementwise(cases, m);
    add_heads(cases, m);
    add_embedding(cases, m);
  }
  add_optimizer(cases, {32768, 896});
  add_update(cases, small);
  for (const ModelShape& m : {small, medium, large, few}) add_model_products(cases, m);
  for (const ModelShape& m : {small, large}) cases.push_back(loss_case(m, 0, true, true));
  for (const ModelShape& m : {small, few}) add_code_cases(cases, m);
  return cases;
}

double bytes_of(const Case& c) {
  double bytes = 0;
  if (c.kind == "embedding") return 2.0 * static_cast<double>(c.outputs[0].bytes());
  if (c.kind == "embedding_grad") return 3.0 * static_cast<double>(c.inputs[0].operand.bytes());
  for (const BenchOperand& input : c.inputs) bytes += static_cast<double>(input.operand.bytes());
  for (const Operand& output : c.outputs) bytes += static_cast<double>(output.bytes()) * (output.accumulate ? 2 : 1);
  return bytes;
}

}  // namespace quern::cuda::bench
