// Times every op at the sizes of real models, through the Device interface: achieved GB/s beside the rate of a
// device-to-device copy, or TFLOP/s for matrix products and attention. Operands rotate through more memory than the L2
// cache holds; launches are captured, as in training; the median of 50 samples is shown.
//
//   cuda_kernels_bench [word ...]     only cases whose line contains one of the words

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_device.h"
#include "quern/error.h"
#include "quern/numeric.h"
#include "quern/rope.h"
#include "quern/step_state.h"

namespace {

using namespace quern;
using cuda::CudaDevice;

constexpr std::size_t kRotated = std::size_t{256} << 20;  // bytes, several times any L2 cache
constexpr int kSamples = 50, kLeastLaunches = 16;

enum class Fill { normal, positive, positions, tokens, update, step, scale_state };

struct BenchOperand {
  Operand operand;
  Fill fill = Fill::normal;
  std::int64_t limit = 0;  ///< positions and tokens are below it
};

struct Case {
  std::string label, kind;
  std::vector<BenchOperand> inputs;
  std::vector<Operand> outputs;
  Attributes attributes = {};
  Geometry geometry = {};
  double flops = 0;                                ///< 0: a case of bytes
  std::vector<std::pair<int, int>> in_place = {};  ///< output, input
};

Operand operand(DType dtype, Extents extents, bool accumulate = false) {
  return {dtype, std::move(extents), true, accumulate};
}
BenchOperand normal(DType dtype, Extents extents) { return {operand(dtype, std::move(extents))}; }

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;

// ---- cases ----

/// Shapes of one model; heads as attention sees them.
struct ModelShape {
  std::string name;
  Geometry geometry;
  std::int64_t width, ffn, heads, kv_heads, head_dim, vocabulary;
  std::int64_t qkv() const { return (heads + 2 * kv_heads) * head_dim; }
};

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
  Attributes rope = heads, norm = heads, both = heads, attention = heads;
  for (Attributes* attributes : {&rope, &both}) {
    attributes->set("inverse_frequencies", frequencies.inverse);
    attributes->set("magnitude", frequencies.magnitude);
  }
  for (Attributes* attributes : {&norm, &both}) attributes->set("eps", 1e-6);
  attention.set("mask", std::string("causal"));
  attention.set("scale", 1.0 / std::sqrt(static_cast<double>(m.head_dim)));
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
  add("head_norm", shown, {b(qkv), b(w), b(w)}, {packed, rstd}, norm);
  add("head_norm_rope", shown, {b(qkv), b(w), b(w), positions}, {packed, rstd, packed}, both);
  cases.back().outputs[0].present = false;
  add("head_norm_grad", shown, {b(qkv), b(qkv), b(w), b(w), {rstd}}, {packed, gradient, gradient}, norm);
  // Causal attention: half of the pairs; two products forward, five backward.
  const double pairs = static_cast<double>(n) * static_cast<double>(m.geometry.sequence) / 2;
  const double product = 2 * pairs * static_cast<double>(m.heads * m.head_dim);
  const Extents out{n, m.heads * m.head_dim};
  const Operand statistics = operand(kF32, {n, m.heads});
  const std::string tokens = shown + " T " + std::to_string(m.geometry.sequence);
  add("attention", tokens, {b(qkv), {}}, {operand(kBf16, out), statistics}, attention);
  cases.back().flops = 2 * product;
  add("attention_grad", tokens, {b(out), b(qkv), b(out), {statistics}, {}}, {packed}, attention);
  cases.back().flops = 5 * product;
}

void add_optimizer(std::vector<Case>& cases, const Extents& extents) {
  for (DType moments : {kBf16, kF32})
    for (DType master : {kBf16, kF32}) {
      std::string label = "adamw " + to_string(extents) + " master " + std::string(name_of(master)) + ", moments " +
                          std::string(name_of(moments));
      Case adamw{label,
                 "adamw",
                 {normal(kBf16, extents),
                  normal(master, extents),
                  normal(moments, extents),
                  {operand(moments, extents), Fill::positive}},
                 {operand(master, extents), operand(moments, extents), operand(moments, extents)}};
      adamw.inputs.push_back({operand(kF32, {4}), Fill::update});
      adamw.inputs.push_back({operand(DType::u32, {16}), Fill::step});
      adamw.attributes = {{"beta1", 0.9},
                          {"beta2", 0.95},
                          {"eps", 1e-8},
                          {"weight_decay", 0.1},
                          {"object", std::int64_t{3}},
                          {"offset", std::int64_t{0}}};
      adamw.in_place = {{0, 1}, {1, 2}, {2, 3}};
      cases.push_back(std::move(adamw));
    }
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

/// The three products of y = x W^T, W (out, in), over n tokens; weight gradients accumulate.
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

void add_loss(std::vector<Case>& cases, const ModelShape& m) {
  const std::int64_t n = m.geometry.tokens();
  const Extents x{n, m.width}, weight{m.vocabulary, m.width};
  Case loss{"lm_loss_train " + m.name,
            "lm_loss_train",
            {normal(kBf16, x), normal(kBf16, weight), {operand(DType::i32, {n}), Fill::tokens, m.vocabulary}},
            {operand(kF32, {n}), operand(kBf16, x), operand(kBf16, weight, true)}};
  loss.geometry = m.geometry;
  loss.flops = 3 * 2.0 * static_cast<double>(n * m.width) * static_cast<double>(m.vocabulary);
  cases.push_back(std::move(loss));
}

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
    const bool given = way == "quantize_by";
    const std::string kind = producer.empty() ? way : producer + "_" + way;
    if (way == "quantize_delayed") inputs.push_back(state);
    if (given) inputs.push_back(scale);
    outputs.push_back(operand(format, size));
    if (!given) outputs.push_back(operand(kF32, {1}));
    outputs.push_back(operand(format, {size[1], size[0]}));
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
  for (const char* way : {"quantize_delayed", "quantize", "quantize_by"}) {
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
  add("rope_grad", "quantize_delayed", qkv, e5m2,
      {b(qkv), {operand(DType::i32, {n}), Fill::positions, m.geometry.sequence}}, {unread(qkv)},
      {{"heads", m.heads},
       {"kv_heads", m.kv_heads},
       {"head_dim", m.head_dim},
       {"inverse_frequencies", frequencies.inverse},
       {"magnitude", frequencies.magnitude}});
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

/// The three products of y = x W^T as codes: both operands with their sums last.
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
            {{"gradient_format", std::string("e5m2")}, {"fast_accumulation", std::int64_t{1}}}};
  loss.geometry = m.geometry;
  loss.flops = 3 * 2.0 * static_cast<double>(n * m.width) * static_cast<double>(m.vocabulary);
  cases.push_back(std::move(loss));
}

std::vector<Case> all_cases() {
  const ModelShape small{"0.5B", {32, 1024}, 896, 4864, 14, 2, 64, 151936};
  const ModelShape medium{"1.5B", {32, 1024}, 1536, 8960, 12, 2, 128, 151936};
  const ModelShape large{"7B", {16, 1024}, 3584, 18944, 28, 4, 128, 152064};
  const ModelShape few{"7B (4k)", {4, 1024}, 3584, 18944, 28, 4, 128, 152064};
  std::vector<Case> cases;
  for (const ModelShape& m : {small, large}) {
    add_norms(cases, m);
    add_elementwise(cases, m);
    add_heads(cases, m);
    add_embedding(cases, m);
    add_quantize(cases, m);
  }
  add_optimizer(cases, {32768, 896});
  for (const ModelShape& m : {small, medium, large, few}) add_model_products(cases, m);
  for (const ModelShape& m : {small, medium, large, few}) add_code_products(cases, m);
  for (const ModelShape& m : {small, large}) {
    add_loss(cases, m);
    add_code_loss(cases, m);
  }
  return cases;
}

// ---- running ----

/// Device memory that is given back.
class Memory {
 public:
  Memory(CudaDevice& device, std::size_t bytes, MemoryKind kind = MemoryKind::device)
      : device_(device), kind_(kind), data_(static_cast<std::byte*>(device.allocate(kind, bytes))) {}
  ~Memory() { device_.release(kind_, data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return data_; }

 private:
  CudaDevice& device_;
  MemoryKind kind_;
  std::byte* data_;
};

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
constexpr std::size_t kPattern = std::size_t{16} << 20;  // bytes of host data that operands repeat

class Bench {
 public:
  explicit Bench(CudaDevice& device)
      : device_(device), stream_(device.stream(StreamKind::compute)), pattern_(device, kPattern, MemoryKind::pinned) {}

  /// Bytes a second, read and written.
  double copy_rate() {
    const std::size_t bytes = std::size_t{1} << 30;
    Memory memory(device_, 2 * bytes);
    auto copy = [&](int) { device_.copy(memory.data() + bytes, memory.data(), bytes, stream_); };
    return 2.0 * static_cast<double>(bytes) / (1e-3 * median_ms(4, copy));
  }

  /// Milliseconds of one launch.
  double run(const Case& c) {
    OpInstance op{c.kind, {}, c.outputs, c.attributes, c.geometry};
    for (const BenchOperand& input : c.inputs) op.inputs.push_back(input.operand);
    OpSupport support = device_.query(op);
    if (!support.refusal.empty()) throw std::runtime_error(support.refusal);
    std::unique_ptr<Kernel> kernel = device_.prepare(op);
    std::size_t set_bytes = 256;
    for (const Operand& operand : op.inputs) set_bytes += aligned(static_cast<std::size_t>(operand.bytes()));
    for (const Operand& operand : op.outputs) set_bytes += aligned(static_cast<std::size_t>(operand.bytes()));
    const int sets = static_cast<int>(std::clamp<std::size_t>(kRotated / set_bytes + 1, 2, 64));
    Memory memory(device_, set_bytes * static_cast<std::size_t>(sets));
    Memory workspace(device_, std::max<std::size_t>(support.workspace_bytes, 256));
    std::vector<std::vector<View>> inputs, outputs;
    for (int set = 0; set < sets; ++set)
      bind(c, memory.data() + set_bytes * static_cast<std::size_t>(set), inputs, outputs);
    auto launch = [&](int i) {
      const auto set = static_cast<std::size_t>(i % sets);
      kernel->launch(inputs[set], outputs[set], {stream_, workspace.data()});
    };
    return median_ms(std::max(sets, kLeastLaunches), launch);
  }

 private:
  template <class Body>
  double median_ms(int launches, const Body& body) {
    auto all = [&] {
      for (int i = 0; i < launches; ++i) body(i);
    };
    all();
    device_.synchronize(stream_);
    std::unique_ptr<Graph> graph = device_.capture(stream_, all);
    graph->launch(stream_);
    while (events_.size() < kSamples + 1) events_.push_back(device_.make_event());
    device_.record(events_[0], stream_);
    for (std::size_t i = 1; i <= kSamples; ++i) {
      graph->launch(stream_);
      device_.record(events_[i], stream_);
    }
    device_.synchronize(stream_);
    std::vector<double> times;
    for (std::size_t i = 1; i <= kSamples; ++i) times.push_back(device_.elapsed(events_[i - 1], events_[i]) / launches);
    std::nth_element(times.begin(), times.begin() + kSamples / 2, times.end());
    return times[kSamples / 2];
  }

  /// Adds the views of one set of operands, and fills its inputs.
  void bind(const Case& c, std::byte* memory, std::vector<std::vector<View>>& inputs,
            std::vector<std::vector<View>>& outputs) {
    auto place = [&memory](const Operand& operand) {
      View view{operand.present ? memory : nullptr, operand.dtype, operand.extents};
      if (operand.present) memory += aligned(view.bytes());
      return view;
    };
    std::vector<View> in, out;
    for (const BenchOperand& input : c.inputs) {
      in.push_back(place(input.operand));
      if (in.back()) fill(input, in.back());
    }
    for (std::size_t i = 0; i < c.outputs.size(); ++i) {
      auto same = std::find_if(c.in_place.begin(), c.in_place.end(),
                               [&](auto pair) { return pair.first == static_cast<int>(i); });
      out.push_back(same == c.in_place.end() ? place(c.outputs[i]) : in[static_cast<std::size_t>(same->second)]);
      if (out.back() && same == c.in_place.end()) device_.fill(out.back().data, 0, out.back().bytes(), stream_);
    }
    inputs.push_back(std::move(in));
    outputs.push_back(std::move(out));
  }

  void fill(const BenchOperand& input, const View& view) {
    const std::size_t bytes = view.bytes(), part = std::min(bytes, kPattern);
    device_.synchronize(stream_);  // the pattern is free again
    write_pattern(input, view.dtype, part / size_of(view.dtype));
    for (std::size_t done = 0; done < bytes; done += part)
      device_.copy(view.as<std::byte>() + done, pattern_.data(), std::min(part, bytes - done), stream_);
  }

  /// `count` elements; noise of order one, since products of zeros run faster than those of data.
  void write_pattern(const BenchOperand& input, DType dtype, std::size_t count) {
    void* to = pattern_.data();
    std::uint64_t state = 0x9E3779B97F4A7C15u;
    auto next = [&state] {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      return state >> 32;
    };
    if (input.fill == Fill::update) {
      UpdateState update;
      update.gradient_scale = 1e-3f, update.apply = 1;
      std::memcpy(to, &update, sizeof update);
    } else if (input.fill == Fill::step) {
      StepState step;
      step.step = 100, step.seed_low = 7, step.learning_rate = 1e-4f;
      std::memcpy(to, &step, sizeof step);
    } else if (input.fill == Fill::scale_state) {
      std::memset(to, 0, count * sizeof(float));
      static_cast<ScaleState*>(to)->scale = 0x1p-6f;
    } else {
      for (std::size_t i = 0; i < count; ++i) {
        float value = static_cast<float>(static_cast<double>(next()) * 0x1p-31 - 1.0);
        if (input.fill == Fill::positive) value *= value;
        if (input.fill == Fill::positions)
          static_cast<std::int32_t*>(to)[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % input.limit);
        else if (input.fill == Fill::tokens)
          static_cast<std::int32_t*>(to)[i] =
              static_cast<std::int32_t>(static_cast<std::int64_t>(next()) % input.limit);
        else if (dtype == DType::f32)
          static_cast<float*>(to)[i] = value;
        else if (dtype == DType::e4m3)
          static_cast<std::uint8_t*>(to)[i] = float_to_e4m3(value);
        else
          static_cast<std::uint16_t*>(to)[i] = float_to_bf16(value);
      }
    }
  }

  CudaDevice& device_;
  Stream stream_;
  Memory pattern_;
  std::vector<Event> events_;
};

/// As a perfect kernel would move them: every operand once, a sum into a gradient twice, of an embedding the rows used.
double bytes_of(const Case& c) {
  double bytes = 0;
  if (c.kind == "embedding") return 2.0 * static_cast<double>(c.outputs[0].bytes());
  if (c.kind == "embedding_grad") return 3.0 * static_cast<double>(c.inputs[0].operand.bytes());
  for (const BenchOperand& input : c.inputs) bytes += static_cast<double>(input.operand.bytes());
  for (const Operand& output : c.outputs) bytes += static_cast<double>(output.bytes()) * (output.accumulate ? 2 : 1);
  return bytes;
}

void bench(const std::vector<std::string>& words) {
  CudaDevice device{cuda::CudaOptions{}};
  device.open(0);
  Bench bench(device);
  const double copy = bench.copy_rate();
  std::printf("%s, copy %.0f GB/s\n%-66s %9s %9s %8s\n", device.traits().name.c_str(), copy * 1e-9, "op", "us", "GB/s",
              "of copy");
  for (const Case& c : all_cases()) {
    auto wanted = [&](const std::string& word) { return c.label.find(word) != std::string::npos; };
    if (!words.empty() && std::none_of(words.begin(), words.end(), wanted)) continue;
    try {
      const double seconds = 1e-3 * bench.run(c), rate = bytes_of(c) / seconds;
      if (c.flops > 0)
        std::printf("%-66s %9.1f %9.0f TFLOP/s\n", c.label.c_str(), seconds * 1e6, c.flops / seconds * 1e-12);
      else
        std::printf("%-66s %9.1f %9.0f %7.1f%%\n", c.label.c_str(), seconds * 1e6, rate * 1e-9, 100 * rate / copy);
    } catch (const std::exception& error) {
      std::printf("%-66s %s\n", c.label.c_str(), error.what());
    }
    std::fflush(stdout);
  }
}

}  // namespace

int main(int count, char** words) {
  try {
    bench({words + 1, words + count});
  } catch (const quern::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.code());
  }
  return 0;
}
