// Cases of the 8-bit formats: quantization behind its producers, 8-bit matmuls, the LM head in 8 bits.
#include "bench.h"
#include "quern/block_scales.h"
#include "quern/rope.h"
#include "quern/step_state.h"

namespace quern::cuda::bench {

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;

/// Producers behind which values are quantized, and quantize alone, at the widths of a block. Values are below 1, so
/// that the state's scale holds.
void add_quantize(std::vector<Case>& cases, const ModelShape& m) {
  const std::int64_t n = m.geometry.tokens();
  const DType e4m3 = DType::e4m3, e5m2 = DType::e5m2;
  const Extents x{n, m.width}, half{n, m.ffn}, packed{n, 2 * m.ffn}, qkv{n, m.qkv()}, w{m.width};
  auto b = [](const Extents& extents) { return normal(kBf16, extents); };
  auto unread = [](const Extents& extents) { return Operand{kBf16, extents, false, false}; };
  const BenchOperand state{operand(kF32, {kScaleStateWords + 16}), Fill::scale_state}, scale = normal(kF32, {1});
  auto add = [&](const std::string& producer, const std::string& way, const Extents& size, DType format,
                 std::vector<BenchOperand> inputs, std::vector<Operand> outputs, Attributes attributes = {}) {
    const bool given = way == "quantize_by", blocks = way == "quantize_blocks";
    const std::string kind = producer.empty() ? way : producer + "_" + way;
    if (way == "quantize_delayed") inputs.push_back(state);
    if (given) inputs.push_back(scale);
    outputs.push_back(operand(format, size));
    if (!given) outputs.push_back(operand(kF32, blocks ? row_block_scales(n, size[1]) : Extents{1}));
    outputs.push_back(operand(format, {size[1], size[0]}));
    if (blocks) outputs.push_back(operand(kF32, column_block_scales(n, size[1])));
    attributes.set("format", std::string(name_of(format)));
    attributes.set("history", std::int64_t{16});
    attributes.set("margin", std::int64_t{0});
    cases.push_back(
        {kind + " " + to_string(size), kind, std::move(inputs), std::move(outputs), std::move(attributes), m.geometry});
  };
  for (const Extents& size : {x, half, packed})
    for (const char* way : {"quantize_delayed", "quantize", "quantize_by"}) add("", way, size, e4m3, {b(size)}, {});
  add("", "quantize_by", packed, e4m3, {b(packed)}, {});
  cases.back().label += " q only";
  cases.back().outputs[1].present = false;
  for (const Extents& size : {x, half, packed}) add("", "quantize_blocks", size, e4m3, {b(size)}, {});
  for (const char* way : {"quantize_delayed", "quantize", "quantize_by", "quantize_blocks"}) {
    add("swiglu", way, half, e4m3, {b(packed)}, {unread(half)});
    add("swiglu_grad", way, packed, e5m2, {b(half), b(packed)}, {unread(packed)});
  }
  const Operand stream = operand(kBf16, x), stats = operand(kF32, {n});
  const Attributes eps{{"eps", 1e-6}};
  add("rms_norm", "quantize_delayed", x, e4m3, {b(x), b(w)}, {unread(x), stats}, eps);
  add("add_rms_norm", "quantize_delayed", x, e4m3, {b(x), b(x), b(w)}, {stream, unread(x), stats}, eps);
  add("rms_norm_grad_add", "quantize_delayed", x, e5m2, {b(x), b(x), b(w), normal(kF32, {n}), b(x)},
      {unread(x), operand(kBf16, w, true), stream});
  const RopeFrequencies frequencies = rope_frequencies({}, m.head_dim);
  const BenchOperand positions{operand(DType::i32, {n}), Fill::positions, m.geometry.sequence};
  const Attributes heads{{"heads", m.heads},
                         {"kv_heads", m.kv_heads},
                         {"head_dim", m.head_dim},
                         {"inverse_frequencies", frequencies.inverse},
                         {"magnitude", frequencies.magnitude}};
  add("rope_grad", "quantize_delayed", qkv, e5m2, {b(qkv), positions}, {unread(qkv)}, heads);
  add("rope_grad", "quantize_delayed", qkv, e5m2, {b(qkv), positions}, {operand(kBf16, qkv)}, heads);
  cases.back().label += " and values";
  add("rope_grad_column_sum", "quantize_delayed", qkv, e5m2, {b(qkv), positions},
      {unread(qkv), operand(kBf16, {m.qkv()}, true)}, heads);
  const Attributes format{{"format", std::string("e4m3")}};
  for (const Extents& size : {x, half}) {
    const Operand codes = operand(e4m3, size), turned = operand(e4m3, {size[1], size[0]});
    cases.push_back(
        {"quantize_rows " + to_string(size), "quantize_rows", {b(size)}, {codes, operand(kF32, {n})}, format});
    cases.push_back({"quantize_columns " + to_string(size),
                     "quantize_columns",
                     {b(size)},
                     {turned, operand(kF32, {size[1]})},
                     format});
    cases.push_back({"transpose e4m3 " + to_string(size), "transpose", {{codes}}, {turned}});
  }
}

/// The three matmuls of y = x W^T in 8 bits: both operands K-major.
void add_code_products(std::vector<Case>& cases, const ModelShape& m) {
  const std::int64_t n = m.geometry.tokens();
  auto add = [&](const std::string& label, std::int64_t rows, std::int64_t columns, std::int64_t sums,
                 bool accumulate) {
    auto codes = [](Extents extents) { return normal(DType::e4m3, std::move(extents)); };
    const BenchOperand scale = normal(kF32, {1});
    Case matmul{"matmul e4m3 " + m.name + " " + label,
                "matmul",
                {codes({rows, sums}), codes({columns, sums}), {}, scale, scale},
                {operand(kBf16, {rows, columns}, accumulate)},
                {{"transpose_b", std::int64_t{1}}, {"fast_accumulation", std::int64_t{1}}}};
    matmul.flops = 2.0 * static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(sums);
    cases.push_back(std::move(matmul));
  };
  auto three = [&](const std::string& name, std::int64_t out, std::int64_t in) {
    add(name + " output", n, out, in, false);
    add(name + " input gradient", n, in, out, false);
    add(name + " weight gradient", out, in, n, true);
  };
  three("qkv", m.qkv(), m.width);
  three("o", m.width, m.heads * m.head_dim);
  three("up", 2 * m.ffn, m.width);
  three("down", m.width, m.ffn);
}

void add_code_loss(std::vector<Case>& cases, const ModelShape& m) {
  const std::int64_t n = m.geometry.tokens();
  const Extents x{n, m.width}, weight{m.vocabulary, m.width};
  auto codes = [](Extents extents) { return normal(DType::e4m3, std::move(extents)); };
  const BenchOperand scale = normal(kF32, {1});
  Case loss{"lm_loss_train e4m3 " + m.name,
            "lm_loss_train",
            {normal(kBf16, x),
             normal(kBf16, weight),
             {operand(DType::i32, {n}), Fill::tokens, m.vocabulary},
             codes(x),
             scale,
             codes({m.width, n}),
             codes(weight),
             scale,
             codes({m.width, m.vocabulary})},
            {operand(kF32, {n}), operand(kBf16, x), operand(kBf16, weight, true)},
            {{"gradient_format", std::string("e5m2")},
             {"fast_output", std::int64_t{1}},
             {"fast_input_gradient", std::int64_t{1}},
             {"fast_weight_gradient", std::int64_t{1}}}};
  loss.geometry = m.geometry;
  loss.flops = 3 * 2.0 * static_cast<double>(n * m.width) * static_cast<double>(m.vocabulary);
  cases.push_back(std::move(loss));
}

}  // namespace

void add_code_cases(std::vector<Case>& cases, const ModelShape& model) {
  add_quantize(cases, model);
  add_code_products(cases, model);
  add_code_loss(cases, model);
}

}  // namespace quern::cuda::bench
